//! How a run is controlled.

use std::path::{PathBuf, absolute};

use clap::Args;
use forebay::control::{ConfigFile, Control, ControlSocket, Mount};

use crate::failure::Failure;

/// What a run is asked and changed by.
#[derive(Debug, Args)]
pub(crate) struct ControlOptions {
    /// Mount the knobs on DIR, an empty directory, for as long as the run lasts: files as in sysfs
    /// and procfs, to be read and written while packets flow
    #[arg(long, value_name = "DIR")]
    pub(crate) mount: Option<PathBuf>,

    /// Listen there for get, set, list, watch and explain
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,

    /// Set the knobs of this file before the first frame, but for those that options set
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

/// Where a run is asked and changed, for as long as this lives.
pub(crate) struct Faces {
    _mount: Option<Mount>,
    _socket: Option<ControlSocket>,
}

impl ControlOptions {
    /// Reads the config file, and says what stands in the way of the rest, before anything is
    /// opened.
    pub(crate) fn read(&self) -> Result<Option<ConfigFile>, Failure> {
        let config = self.config.as_deref().map(ConfigFile::read).transpose()?;
        self.mount.as_deref().map(Mount::check).transpose()?;
        Ok(config)
    }

    /// Sets the knobs as the config file has them, but for those that options have `given`, and
    /// lets others ask and set. Signals are caught by now: none may leave a mount behind.
    pub(crate) fn open(
        &self,
        control: &Control,
        config: Option<&ConfigFile>,
        given: &[&str],
    ) -> Result<Faces, Failure> {
        if let Some(config) = config {
            apply(config, control, given)?;
        }
        let path = config.map(|config| absolute(config.path())).transpose().unwrap_or_default();
        let listen = |at: &PathBuf| ControlSocket::open(control.clone(), at, path);
        let socket = self.control.as_ref().map(listen).transpose()?;
        let mount = |directory: &PathBuf| Mount::new(control.clone(), directory);
        Ok(Faces { _mount: self.mount.as_ref().map(mount).transpose()?, _socket: socket })
    }
}

/// Sets the knobs of a config file, and says what of it is not in force.
pub(crate) fn apply(
    config: &ConfigFile,
    control: &Control,
    given: &[&str],
) -> Result<(), forebay::Error> {
    for note in config.apply(control, given)? {
        eprintln!("forebay: {}: {note}", config.path().display());
    }
    Ok(())
}
