//! Generator, for quinn, of connection IDs that encode their endpoint.

use std::sync::Arc;

use forebay::net::connection_id::{ConnectionIds, EndpointIndex};
use quinn_proto::{ConnectionId, ConnectionIdGenerator, InvalidCid};

/// Generator of one endpoint's connection IDs.
///
/// All bytes of an ID but four are random. Of IDs with 8 bytes, two of 65,536 are likely to be alike; quinn's endpoint asks for
/// another instead of one that a live connection has. Only holders of the group's key can tell which endpoint issued an ID.
#[derive(Clone, Debug)]
pub struct EndpointIds {
    ids: Arc<ConnectionIds>,
    place: EndpointIndex,
}

impl EndpointIds {
    /// Creates the generator of the endpoint with this index.
    #[must_use]
    pub fn new(ids: Arc<ConnectionIds>, place: EndpointIndex) -> Self {
        Self { ids, place }
    }
}

impl ConnectionIdGenerator for EndpointIds {
    fn generate_cid(&mut self) -> ConnectionId {
        let id = self.ids.issue(self.place, forebay_sys::random_key());
        ConnectionId::new(id.as_bytes())
    }

    fn validate(&self, id: &ConnectionId) -> Result<(), InvalidCid> {
        match self.ids.place_of(id) {
            Some(place) if place == self.place => Ok(()),
            Some(_) | None => Err(InvalidCid),
        }
    }

    fn cid_len(&self) -> usize {
        self.ids.id_bytes()
    }

    fn cid_lifetime(&self) -> Option<std::time::Duration> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn udp_12_endpoints_know_their_own_ids() {
        let ids = Arc::new(ConnectionIds::new([5; 16], 12).unwrap());
        let mut endpoints =
            [0, 1, 2].map(|place| EndpointIds::new(Arc::clone(&ids), EndpointIndex(place)));
        for issuer in 0..endpoints.len() {
            let id = endpoints[issuer].generate_cid();
            assert_eq!((id.len(), endpoints[issuer].cid_len()), (12, 12));
            assert_ne!(id, endpoints[issuer].generate_cid());
            for (place, endpoint) in endpoints.iter().enumerate() {
                assert_eq!(endpoint.validate(&id).is_ok(), place == issuer);
            }
        }
    }
}
