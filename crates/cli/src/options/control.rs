//! Options of control.

use std::path::{PathBuf, absolute};

use clap::Args;
use forebay_control::{BoundSocket, ConfigFile, Control, ControlSocket, Mount};
use forebay_metrics::Metrics;
use forebay_sys::User;
use tracing::warn;

use crate::failure::Failure;
use crate::options::socket::SocketPlace;

/// Interfaces for querying and changing a run.
#[derive(Debug, Args)]
pub(crate) struct ControlOptions {
    /// Mount the knobs on DIR, an empty directory, for as long as the run lasts: files as in sysfs
    /// and procfs, to be read and written while packets flow
    #[arg(long, value_name = "DIR")]
    pub(crate) mount: Option<PathBuf>,

    /// Listen there for get, set, list, watch, explain and top [default: a live run listens where
    /// these look, at NAME.sock in $RUNTIME_DIRECTORY, else in $XDG_RUNTIME_DIR/forebay, else, for
    /// root, in /run/forebay; with --user, in a directory of that user's there]
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,

    /// Name of this run for get, set, list, watch, explain and top [default: the names of its
    /// devices]
    #[arg(long, value_name = "NAME", conflicts_with = "control")]
    pub(crate) name: Option<String>,

    /// Do not listen
    #[arg(long, conflicts_with_all = ["control", "name"])]
    pub(crate) no_control: bool,

    /// Set the knobs of this file before the first frame, but for those that options set; of a live
    /// run, it has the options too, where they are not typed
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

/// Open control interfaces of a run. Dropping them closes them.
pub(crate) struct Faces {
    _mount: Option<Mount>,
    _socket: Option<ControlSocket>,
}

impl ControlOptions {
    /// Reads the config file and checks the mount point, so that their errors are reported before
    /// anything is opened.
    pub(crate) fn read(&self) -> Result<Option<ConfigFile>, Failure> {
        let config = self.config.as_deref().map(ConfigFile::read).transpose()?;
        self.mount.as_deref().map(Mount::check).transpose()?;
        Ok(config)
    }

    /// Determines the place of the control socket, if there is to be one. `name` is the default name
    /// of a run that listens by default. A run that becomes the user `later` does so afterwards, and
    /// then binds the socket.
    pub(crate) fn place(
        &self,
        name: Option<&str>,
        later: Option<User>,
    ) -> Result<Option<SocketPlace>, Failure> {
        Ok(match (&self.control, &self.name, name) {
            (Some(at), ..) => Some(SocketPlace::bound(at, later)?),
            (None, Some(name), _) => Some(SocketPlace::named(name, later)?),
            (None, None, Some(name)) if !self.no_control => SocketPlace::by_default(name, later),
            _ => None,
        })
    }

    /// Sets the knobs of the config file, except those in `given`, which options set, and opens the
    /// control interfaces; clients of the socket can read the counts. Signal handlers must be
    /// installed before: no signal may leave a mount behind.
    pub(crate) fn open(
        &self,
        control: &Control,
        counts: Metrics,
        config: Option<&ConfigFile>,
        given: &[String],
        socket: Option<BoundSocket>,
    ) -> Result<Faces, Failure> {
        if let Some(config) = config {
            apply(config, control, given)?;
        }
        let path = config.map(|config| absolute(config.path())).transpose().unwrap_or_default();
        let socket = socket.map(|socket| {
            socket.with_metrics(move || counts.view_text()).serve(control.clone(), path)
        });
        let socket = socket.transpose()?;
        let mount = |directory: &PathBuf| Mount::new(control.clone(), directory);
        Ok(Faces { _mount: self.mount.as_ref().map(mount).transpose()?, _socket: socket })
    }
}

/// Sets the knobs of a config file, and reports settings that are not in effect.
pub(crate) fn apply(
    config: &ConfigFile,
    control: &Control,
    given: &[String],
) -> Result<(), forebay_sys::Error> {
    for note in config.apply(control, given)? {
        let file = config.path().display();
        warn!(%file, "{file}: {note}");
    }
    Ok(())
}
