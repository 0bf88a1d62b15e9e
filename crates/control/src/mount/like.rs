//! File systems of the kernel that files behave like: they differ in their use of offsets, and in
//! their errors for impossible operations.

use forebay_engine::knobs::Knob;

/// Maximum number of bytes of a write that a sysfs attribute takes (`kernfs_fop_write_iter` in
/// fs/kernfs/file.c), and its nominal size.
const PAGE_BYTES: u16 = 4096;

/// File system of the kernel that a file or directory behaves like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Like {
    /// /sys: every write is a new value at any offset, up to a page.
    Sysfs,
    /// /proc, except /proc/sys: read-only.
    Procfs,
    /// /proc/sys: a value is read and written only at the start of the file.
    Sysctl,
}

impl Like {
    /// File system for a path from the root of the tree.
    pub(super) fn of(path: &str) -> Self {
        match path.strip_prefix("proc") {
            Some(below) if below == "/sys" || below.starts_with("/sys/") => Self::Sysctl,
            Some(below) if below.is_empty() || below.starts_with('/') => Self::Procfs,
            _ => Self::Sysfs,
        }
    }

    /// Nominal size of files.
    pub(super) fn size_bytes(self) -> u64 {
        match self {
            Self::Sysfs => PAGE_BYTES.into(),
            Self::Procfs | Self::Sysctl => 0,
        }
    }

    /// Preferred read size of a file (`st_blksize`).
    pub(super) fn block_bytes(self) -> u32 {
        match self {
            Self::Sysfs => PAGE_BYTES.into(),
            Self::Procfs | Self::Sysctl => 1024,
        }
    }

    /// Mode of a directory.
    pub(super) fn directory_mode(self, path: &str) -> u16 {
        match self {
            Self::Sysfs if path.contains('/') => 0o755,
            _ => 0o555,
        }
    }

    /// Link count of a directory; only sysfs counts subdirectories.
    pub(super) fn directory_links(self, directories: usize) -> u32 {
        match self {
            Self::Sysfs => u32::try_from(directories).unwrap_or(u32::MAX).saturating_add(2),
            Self::Procfs | Self::Sysctl => 1,
        }
    }

    /// True if a file may be opened in a mode in which it can be neither read nor written.
    pub(super) fn is_opened_in_vain(self) -> bool {
        self == Self::Procfs
    }

    /// True if a read behind the start of a file returns nothing (`do_proc_dointvec` in
    /// kernel/sysctl.c).
    pub(super) fn is_read_at_start(self) -> bool {
        self == Self::Sysctl
    }

    /// Part of a write that is looked at.
    pub(super) fn taken(self, data: &[u8]) -> &[u8] {
        match self {
            Self::Sysfs => &data[..data.len().min(PAGE_BYTES.into())],
            Self::Procfs | Self::Sysctl => data,
        }
    }

    /// True if a write succeeds without effect (`proc_first_pos_non_zero_ignore` in
    /// kernel/sysctl.c, with `sysctl_writes_strict` at 1). Masks have another handler.
    pub(super) fn ignores(self, path: &str, offset: u64) -> bool {
        let name = path.rsplit('/').next().unwrap_or_default();
        let is_mask = Knob::named(name).is_some_and(Knob::is_mask);
        self == Self::Sysctl && offset > 0 && !is_mask
    }

    /// Error for creating a file.
    pub(super) fn no_file(self) -> fuser::Errno {
        match self {
            Self::Sysfs => fuser::Errno::EACCES,
            Self::Procfs | Self::Sysctl => fuser::Errno::ENOENT,
        }
    }

    /// Error for creating anything else.
    pub(super) fn nothing_new(self) -> fuser::Errno {
        match self {
            Self::Sysfs => fuser::Errno::EPERM,
            Self::Procfs | Self::Sysctl => fuser::Errno::ENOENT,
        }
    }

    /// Error for removing anything.
    pub(super) fn no_removal(self) -> fuser::Errno {
        match self {
            Self::Sysfs => fuser::Errno::EPERM,
            Self::Procfs | Self::Sysctl => fuser::Errno::EACCES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_choose_their_file_system() {
        for (path, like) in [
            ("", Like::Sysfs),
            ("sys", Like::Sysfs),
            ("sys/class/net/replay/queues/rx-0/rps_cpus", Like::Sysfs),
            ("forebay/coalesce", Like::Sysfs),
            ("process", Like::Sysfs),
            ("proc", Like::Procfs),
            ("proc/net/softnet_stat", Like::Procfs),
            ("proc/system", Like::Procfs),
            ("proc/sys", Like::Sysctl),
            ("proc/sys/net/core/dev_weight", Like::Sysctl),
        ] {
            assert_eq!(Like::of(path), like, "{path}");
        }
    }

    #[test]
    fn only_procfs_ignores_trailing_text() {
        let ignores = |path: &str, offset| Like::of(path).ignores(path, offset);
        assert!(ignores("proc/sys/net/core/dev_weight", 1));
        assert!(!ignores("proc/sys/net/core/dev_weight", 0));
        assert!(!ignores("proc/sys/net/core/rps_default_mask", 1));
        assert!(!ignores("sys/class/net/replay/mtu", 1));
    }
}
