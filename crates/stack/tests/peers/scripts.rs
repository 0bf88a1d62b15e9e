//! Scripts of the folder `packetdrill`. A name that ends in `-ipv4` or `-ipv6` is of that family only, and one in
//! `-mapped` of IPv6 with addresses of IPv4. A first line `// Sysctls: NAME=VALUE …` has settings of TCP that differ from
//! the kernel's own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::judge::Family;

/// Scripts that there are at least.
pub(crate) const LEAST: usize = 850;

/// Mark of the line with settings.
const SYSCTLS: &str = "// Sysctls: ";

/// A script.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    path: PathBuf,
    /// Names and values, with blanks between.
    sysctls: String,
}

impl Script {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Settings of TCP, each as `NAME=VALUE`, with blanks between.
    pub(crate) fn sysctls(&self) -> &str {
        &self.sysctls
    }

    pub(crate) fn name(&self) -> String {
        let stem = self.path.file_stem().unwrap_or_default();
        stem.to_string_lossy().into_owned()
    }

    /// Families that the script is for.
    pub(crate) fn families(&self) -> impl Iterator<Item = Family> {
        let name = self.name();
        let [only_v4, only_v6, is_mapped] =
            ["-ipv4", "-ipv6", "-mapped"].map(|end| name.ends_with(end));
        let families = [
            (Family::V4, !only_v6 && !is_mapped),
            (Family::V6, !only_v4 && !is_mapped),
            (Family::Mapped, is_mapped),
        ];
        families.into_iter().filter_map(|(family, is_meant)| is_meant.then_some(family))
    }
}

/// All scripts of the crate whose folder is given, by name.
pub(crate) fn all(crate_folder: &Path) -> io::Result<Vec<Script>> {
    let mut scripts = Vec::new();
    for folder in fs::read_dir(crate_folder.join("tests/peers/packetdrill"))? {
        for file in fs::read_dir(folder?.path())? {
            let path = file?.path();
            let first = fs::read_to_string(&path)?.lines().next().unwrap_or_default().to_owned();
            let sysctls = first.strip_prefix(SYSCTLS).unwrap_or_default().to_owned();
            scripts.push(Script { path, sysctls });
        }
    }
    scripts.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(scripts)
}
