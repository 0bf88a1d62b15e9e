//! The names that people and scripts give knobs by: paths in the tree, and the ends of paths.

use super::errno::Errno;
use super::live::Control;
use super::refused::Refused;

/// The paths of all files that can be written to.
pub(super) fn knobs(control: &Control) -> Vec<String> {
    let tree = control.tree();
    let writable = tree.files().filter(|(_, file)| file.mode() & 0o200 != 0);
    writable.map(|(path, _)| path).collect()
}

/// The paths that a name fits.
///
/// # Errors
/// `ENOENT` if there are none.
pub(super) fn find(control: &Control, name: &str) -> Result<Vec<String>, Refused> {
    control.named(name).map_err(|errno| {
        let why = match errno {
            Errno::IsDir => format!("{name:?} is a directory, not a knob"),
            _ => format!("there is no knob {name:?}; `list` names those there are"),
        };
        Refused::new(errno, why)
    })
}

/// The paths that a name means when it is written to: one, or the same one of all queues.
///
/// # Errors
/// As [`find`]; `EINVAL` if it fits several others.
pub(super) fn find_for_writing(control: &Control, name: &str) -> Result<Vec<String>, Refused> {
    let found = find(control, name)?;
    if found.len() > 1 && !found.iter().all(|path| short(path).starts_with("rx-")) {
        let names: Vec<_> = found.iter().map(|path| short(path)).collect();
        let why = format!("{name:?} fits {}; say which of them", names.join(", "));
        return Err(Refused::new(Errno::Inval, why));
    }
    Ok(found)
}

/// The shortest end of a path that tells it from the others: with the queue or CPU it is about.
#[must_use]
pub fn short(path: &str) -> &str {
    let parts: Vec<_> = path.rsplitn(3, '/').collect();
    let len_bytes = match parts[..] {
        [last, above, ..] if above.starts_with("rx-") || above.starts_with("cpu") => {
            above.len() + 1 + last.len()
        }
        [last, ..] => last.len(),
        [] => 0,
    };
    &path[path.len() - len_bytes..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_tell_queues_and_cpus_apart() {
        for (path, name) in [
            ("sys/class/net/eth0/queues/rx-3/rps_cpus", "rx-3/rps_cpus"),
            ("sys/devices/system/cpu/cpu1/online", "cpu1/online"),
            ("sys/devices/system/cpu/online", "cpu/online"),
            ("proc/sys/net/core/dev_weight", "dev_weight"),
            ("forebay/cpus", "cpus"),
            ("mtu", "mtu"),
            ("", ""),
        ] {
            assert_eq!(short(path), name, "{path}");
        }
    }
}
