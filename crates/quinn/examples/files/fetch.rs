//! The client: it reads a file, and takes another port now and then while it does.

use std::error::Error;
use std::net::{SocketAddr, UdpSocket};

use quinn::Endpoint;
use ring::digest::{Context, SHA256};

use super::tls;

/// A file that was read.
pub(crate) struct Fetched {
    pub(crate) len: u64,
    pub(crate) sha256: Vec<u8>,
    /// Number of times that the client took another port.
    pub(crate) moves: u32,
}

/// Reads a file, and moves so many times on the way, at equal distances.
pub(crate) async fn fetch(
    endpoint: &Endpoint,
    server: SocketAddr,
    name: &str,
    moves: u32,
) -> Result<Fetched, Box<dyn Error>> {
    let connection = endpoint.connect(server, tls::NAME)?.await?;
    let (mut ask, mut answer) = connection.open_bi().await?;
    ask.write_all(name.as_bytes()).await?;
    ask.finish()?;
    let mut len = [0; 8];
    answer.read_exact(&mut len).await?;
    let len = u64::from_be_bytes(len);
    let (mut read, mut moved, mut digest) = (0u64, 0, Context::new(&SHA256));
    while let Some(chunk) = answer.read_chunk(usize::MAX, true).await? {
        digest.update(&chunk.bytes);
        read += chunk.bytes.len() as u64;
        while moved < moves && read > len / u64::from(moves + 1) * u64::from(moved + 1) {
            endpoint.rebind(UdpSocket::bind(endpoint.local_addr().map(any_port)?)?)?;
            moved += 1;
        }
    }
    if read != len {
        return Err(format!("{read} of {len} bytes came").into());
    }
    connection.close(0u32.into(), b"read");
    endpoint.wait_idle().await;
    Ok(Fetched { len, sha256: digest.finish().as_ref().to_vec(), moves: moved })
}

fn any_port(mut local: SocketAddr) -> SocketAddr {
    local.set_port(0);
    local
}
