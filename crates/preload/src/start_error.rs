//! Reasons why a process gets no engine, in the words that are written to standard error.

use std::{fmt, io};

/// Advice to a program without capabilities. The loader ignores preloaded libraries if it gets them from its file.
pub(crate) const GRANT: &str = "start it as root, or with ambient capabilities (setpriv --inh-caps and --ambient-caps, \
                                AmbientCapabilities= of systemd), and if it gives them up before its first socket, with forebay exec \
                                --via af_packet --open-at-start; with those of its file (setcap) its sockets would be the kernel's";

/// Reason why an engine cannot be opened or started.
pub(crate) enum StartError {
    /// A device, or the engine over it.
    Engine(forebay::Error),
    /// Something that the library itself needs of the system.
    System {
        /// Attempt, as in "start a thread".
        what: &'static str,
        /// Reason.
        source: io::Error,
        /// Advice.
        help: &'static str,
    },
}

impl StartError {
    /// Error of a descriptor that could not be made, for `map_err`.
    pub(crate) fn descriptor(what: &'static str) -> impl Fn(io::Error) -> Self {
        let help = "let the program have more descriptors (ulimit -n), then start it again";
        move |source| Self::System { what, source, help }
    }

    /// Error of a thread that could not be started.
    pub(crate) fn thread(source: io::Error) -> Self {
        let help = "check the limits on threads and memory (ulimit -u, ulimit -v)";
        Self::System { what: "start a thread of the engine", source, help }
    }
}

impl From<forebay::Error> for StartError {
    fn from(error: forebay::Error) -> Self {
        Self::Engine(error)
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Engine(error @ forebay::Error::Privilege { .. }) => write!(f, "{error}; {GRANT}"),
            Self::Engine(error) => write!(f, "{error}; {}", error.help()),
            Self::System { what, source, help } => write!(f, "cannot {what}: {source}; {help}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_5_lacking_privilege_is_not_the_files() {
        let (what, missing) = ("AF_PACKET on eth0".to_owned(), "CAP_NET_RAW".to_owned());
        let help = "grant it with `sudo setcap cap_net_raw+ep program`, or run as root".to_owned();
        let error = StartError::from(forebay::Error::Privilege { what, missing, help });
        let told = error.to_string();
        assert!(told.contains("needs CAP_NET_RAW") && told.contains("ambient"), "{told}");
        assert!(!told.contains("sudo setcap"), "{told}");
        assert!(
            told.contains("--via af_packet --open-at-start"),
            "the only backend that can: {told}"
        );
    }

    #[test]
    fn exe_5_start_error_says_what_helps() {
        let none_left = || io::Error::from_raw_os_error(libc::EMFILE);
        let error = StartError::descriptor("create the memory file of the processes")(none_left());
        let told = error.to_string();
        assert!(told.starts_with("cannot create the memory file of the processes: "), "{told}");
        assert!(told.ends_with("(ulimit -n), then start it again"), "{told}");
        let told = StartError::thread(none_left()).to_string();
        assert!(told.starts_with("cannot start a thread of the engine: "), "{told}");
        assert!(!told.contains("path") && !told.contains("directory"), "{told}");
    }
}
