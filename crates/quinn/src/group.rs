//! Endpoints at one address, told apart by the connection IDs that they issue.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use forebay::net::Net;
use forebay::net::connection_id::{ConnectionIds, EndpointIndex};
use quinn::{Endpoint, EndpointConfig, ServerConfig, TokioRuntime};

use super::ids::EndpointIds;
use super::socket::Socket;

/// Receive buffer of an endpoint's socket, in bytes, if `rmem_max` allows it.
const RCVBUF_BYTES: u32 = 8 << 20;

/// Endpoints at one address.
#[derive(Clone, Debug)]
pub struct EndpointGroup {
    net: Net,
    local: SocketAddr,
    ids: Arc<ConnectionIds>,
}

impl EndpointGroup {
    /// Length of connection IDs, in bytes, if there is no reason for another.
    pub const ID_BYTES: usize = 12;

    /// Creates a group without endpoints, whose key nobody knows. `local` has a port.
    ///
    /// # Errors
    /// `InvalidInput` without a port, and for IDs of fewer than 8 or more than 20 bytes.
    pub fn new(net: &Net, local: SocketAddr, id_bytes: usize) -> io::Result<Self> {
        let refused = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        if local.port() == 0 {
            return Err(refused("endpoints share a port: say which"));
        }
        let ids = ConnectionIds::new(forebay_sys::random_key(), id_bytes)
            .ok_or_else(|| refused("a connection ID of a group has 8 to 20 bytes"))?;
        Ok(Self { net: net.clone(), local, ids: Arc::new(ids) })
    }

    /// Value of the knob `flow_key` by which a connection is a flow, wherever its client is.
    #[must_use]
    pub fn flow_key(&self) -> String {
        format!("auto,quic:{}:{}", self.local.port(), self.ids.id_bytes())
    }

    /// Connection IDs of all endpoints.
    #[must_use]
    pub fn ids(&self) -> &Arc<ConnectionIds> {
        &self.ids
    }

    /// Binds the socket of one endpoint. To be called on the runtime that the endpoint runs on.
    ///
    /// # Errors
    /// As [`forebay::net::SocketOptions::bind`].
    pub fn bind(&self, place: EndpointIndex) -> io::Result<Socket> {
        let options = self.net.socket().reuse_port_by_id(&self.ids, place);
        Socket::new(options.recv_buffer_size(RCVBUF_BYTES).bind(self.local)?)
    }

    /// Binds an endpoint. To be called on the runtime that it runs on: it is read there, so there its
    /// connections go.
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
