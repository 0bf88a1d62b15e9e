//! Groups of endpoints that share an address, selected by the connection IDs that they issue.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use forebay::net::Net;
use forebay::net::connection_id::{ConnectionIds, EndpointIndex};
use quinn::{Endpoint, EndpointConfig, ServerConfig, TokioRuntime};

use super::ids::EndpointIds;
use super::socket::Socket;

/// Receive buffer of an endpoint's socket, in bytes; limited by `rmem_max`.
const RCVBUF_BYTES: u32 = 8 << 20;

/// Group of endpoints that share an address.
#[derive(Clone, Debug)]
pub struct EndpointGroup {
    net: Net,
    local: SocketAddr,
    ids: Arc<ConnectionIds>,
}

impl EndpointGroup {
    /// Recommended length of connection IDs, in bytes.
    pub const ID_BYTES: usize = 12;

    /// Creates a group without endpoints, with a random key. The port of `local` must not be 0.
    ///
    /// # Errors
    /// `InvalidInput` for port 0, or for IDs of fewer than 8 or more than 20 bytes.
    pub fn new(net: &Net, local: SocketAddr, id_bytes: usize) -> io::Result<Self> {
        let refused = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        if local.port() == 0 {
            return Err(refused("endpoints share a port: say which"));
        }
        let ids = ConnectionIds::new(forebay_sys::random_key(), id_bytes)
            .ok_or_else(|| refused("a connection ID of a group has 8 to 20 bytes"))?;
        Ok(Self { net: net.clone(), local, ids: Arc::new(ids) })
    }

    /// Value for the knob `flow_key` that identifies flows by connection ID, so that a flow
    /// survives its client's migration.
    #[must_use]
    pub fn flow_key(&self) -> String {
        format!("auto,quic:{}:{}", self.local.port(), self.ids.id_bytes())
    }

    /// Encoder and decoder of the connection IDs of all endpoints.
    #[must_use]
    pub fn ids(&self) -> &Arc<ConnectionIds> {
        &self.ids
    }

    /// Binds the socket of one endpoint. Must be called on the endpoint's runtime.
    ///
    /// # Errors
    /// As [`forebay::net::SocketOptions::bind`].
    pub fn bind(&self, place: EndpointIndex) -> io::Result<Socket> {
        let options = self.net.socket().reuse_port_by_id(&self.ids, place);
        Socket::new(options.recv_buffer_size(RCVBUF_BYTES).bind(self.local)?)
    }

    /// Creates an endpoint with its own socket. Must be called on the endpoint's runtime: flows are
    /// steered to the CPU on which that runtime reads.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn endpoint(
        &self,
        place: EndpointIndex,
        mut config: EndpointConfig,
        server: ServerConfig,
    ) -> io::Result<Endpoint> {
        let ids = EndpointIds::new(Arc::clone(&self.ids), place);
        config.cid_generator(move || Box::new(ids.clone()));
        let socket = Arc::new(self.bind(place)?);
        Endpoint::new_with_abstract_socket(config, Some(server), socket, Arc::new(TokioRuntime))
    }
}
