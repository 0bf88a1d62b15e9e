//! Errors of the control tree, by the kernel's names.

use std::fmt;

use rustix::io;

/// Reason for refusing a read or write of the tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Errno {
    /// Operation not permitted to this user.
    Perm,
    /// There is no such file.
    NoEnt,
    /// The memory for it cannot be allocated.
    NoMem,
    /// The file's mode does not allow it.
    Access,
    /// In use.
    Busy,
    /// A part of the path is not a directory.
    NotDir,
    /// A directory instead of a file.
    IsDir,
    /// An invalid value.
    Inval,
    /// There is no room for it.
    NoSpc,
    /// A number that exceeds the type it is stored in.
    Range,
    /// A CPU number out of range, or a group of a mask with more than 32 bits.
    Overflow,
}

impl Errno {
    /// All values.
    pub const ALL: [Self; 11] = [
        Self::Perm,
        Self::NoEnt,
        Self::NoMem,
        Self::Access,
        Self::Busy,
        Self::NotDir,
        Self::IsDir,
        Self::Inval,
        Self::NoSpc,
        Self::Range,
        Self::Overflow,
    ];

    /// Name in the kernel's headers, as in `EINVAL`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.name_and_number().0
    }

    /// Errno with that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|errno| errno.name() == name)
    }

    /// Number that a system call of this machine returns, as in `EINVAL` 22.
    #[must_use]
    pub fn code(self) -> i32 {
        self.name_and_number().1.raw_os_error()
    }

    fn name_and_number(self) -> (&'static str, io::Errno) {
        match self {
            Self::Perm => ("EPERM", io::Errno::PERM),
            Self::NoEnt => ("ENOENT", io::Errno::NOENT),
            Self::NoMem => ("ENOMEM", io::Errno::NOMEM),
            Self::Access => ("EACCES", io::Errno::ACCESS),
            Self::Busy => ("EBUSY", io::Errno::BUSY),
            Self::NotDir => ("ENOTDIR", io::Errno::NOTDIR),
            Self::IsDir => ("EISDIR", io::Errno::ISDIR),
            Self::Inval => ("EINVAL", io::Errno::INVAL),
            Self::NoSpc => ("ENOSPC", io::Errno::NOSPC),
            Self::Range => ("ERANGE", io::Errno::RANGE),
            Self::Overflow => ("EOVERFLOW", io::Errno::OVERFLOW),
        }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::error::Error for Errno {}
