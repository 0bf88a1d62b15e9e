//! File systems of the kernel that files behave like: they differ in what they do with offsets,
//! and with what cannot be done at all.

use forebay_engine::knobs::Knob;

/// Bytes of one write that an attribute of sysfs takes (`kernfs_fop_write_iter` in
/// fs/kernfs/file.c); also the size that it pretends to have.
const PAGE_BYTES: u16 = 4096;

/// A file or directory is like those of …
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Like {
    /// /sys: every write is a new value wherever it stands, up to a page.
    Sysfs,
    /// /proc, but for /proc/sys: only read.
    Procfs,
    /// /proc/sys: a value is read and written at the start of the file, and nowhere else.
    Sysctl,
}

impl Like {
    /// File system that a path from the root of the tree belongs to.
    pub(super) fn of(path: &str) -> Self {
        match path.strip_prefix("proc") {
            Some(below) if below == "/sys" || below.starts_with("/sys/") => Self::Sysctl,
            Some(below) if below.is_empty() || below.starts_with('/') => Self::Procfs,
            _ => Self::Sysfs,
        }
    }

    /// The size that files pretend to have.
    pub(super) fn size_bytes(self) -> u64 {
        match self {
            Self::Sysfs => PAGE_BYTES.into(),
            Self::Procfs | Self::Sysctl => 0,
        }
    }

    /// Read size of a file, according to its attributes.
    pub(super) fn block_bytes(self) -> u32 {
        match self {
            Self::Sysfs => PAGE_BYTES.into(),
            Self::Procfs | Self::Sysctl => 1024,
        }
    }

    /// The mode of a directory.
    pub(super) fn directory_mode(self, path: &str) -> u16 {
        match self {
            Self::Sysfs if path.contains('/') => 0o755,
            _ => 0o555,
        }
    }

    /// The links that a directory has; only sysfs counts the directories in it.
    pub(super) fn directory_links(self, directories: usize) -> u32 {
        match self {
            Self::Sysfs => u32::try_from(directories).unwrap_or(u32::MAX).saturating_add(2),
            Self::Procfs | Self::Sysctl => 1,
        }
    }

    /// True if a file may be opened that neither can be read nor written so.
    pub(super) fn is_opened_in_vain(self) -> bool {
        self == Self::Procfs
    }

    /// True if there is nothing to be read but at the start of a file (`do_proc_dointvec` in
    /// kernel/sysctl.c).
    pub(super) fn is_read_at_start(self) -> bool {
        self == Self::Sysctl
    }

    /// The part of a write that is looked at.
    pub(super) fn taken(self, data: &[u8]) -> &[u8] {
        match self {
            Self::Sysfs => &data[..data.len().min(PAGE_BYTES.into())],
            Self::Procfs | Self::Sysctl => data,
        }
    }

    /// True if a write is taken and nothing done about it (`proc_first_pos_non_zero_ignore` in
    /// kernel/sysctl.c, with `sysctl_writes_strict` at 1). Masks are read with other means.
    pub(super) fn ignores(self, path: &str, offset: u64) -> bool {
        let name = path.rsplit('/').next().unwrap_or_default();
        let is_mask = Knob::named(name).is_some_and(Knob::is_mask);
        self == Self::Sysctl && offset > 0 && !is_mask
    }

    /// Error for making a file.
    pub(super) fn no_file(self) -> fuser::Errno {
        match self {
            Self::Sysfs => fuser::Errno::EACCES,
            Self::Procfs | Self::Sysctl => fuser::Errno::ENOENT,
        }
    }

    /// Error for making anything else.
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
