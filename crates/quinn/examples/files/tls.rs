//! Certificates: the server makes one, the client trusts no other.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use quinn::{ClientConfig, ServerConfig, TransportConfig};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};

/// Name that the certificate is for.
pub(crate) const NAME: &str = "files.test";

/// A server's configuration, and its certificate.
pub(crate) fn server() -> Result<(ServerConfig, Vec<u8>), Box<dyn Error>> {
    install();
    let made = rcgen::generate_simple_self_signed(vec![NAME.to_owned()])?;
    let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let der = made.cert.der().clone();
    let mut config = ServerConfig::with_single_cert(vec![der.clone()], key.into())?;
    config.transport_config(transport()?);
    Ok((config, der.to_vec()))
}

/// A client's configuration.
pub(crate) fn client(certificate: &[u8]) -> Result<ClientConfig, Box<dyn Error>> {
    install();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from(certificate.to_vec()))?;
    let mut config = ClientConfig::with_root_certificates(Arc::new(roots))?;
    config.transport_config(transport()?);
    Ok(config)
}

fn transport() -> Result<Arc<TransportConfig>, Box<dyn Error>> {
    let mut transport = TransportConfig::default();
    transport.max_idle_timeout(Some(Duration::from_secs(20).try_into()?));
    Ok(Arc::new(transport))
}

fn install() {
    // Whoever did it before has installed the same.
    let _ = rustls::crypto::ring::default_provider().install_default();
}
