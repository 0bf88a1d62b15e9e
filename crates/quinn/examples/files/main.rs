//! Files over QUIC: a server with an endpoint on each CPU, and a client that moves while it reads.
//!
//! ```text
//! files serve VIA DEVICE ADDRESS ROOT CERTIFICATE     VIA: af_xdp, af_packet, tap, …; or kernel
//! files fetch ADDRESS CERTIFICATE NAME MOVES          prints length, time and SHA-256
//! ```

mod fetch; // the client
mod serve; // the server
mod tls; //   certificates

use std::error::Error;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Instant;

use forebay::net::{Net, NetConfig};
use forebay::{Config, Device, DeviceConfig};
use forebay_quinn::EndpointGroup;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

const HELP: &str = "files serve VIA DEVICE ADDRESS ROOT CERTIFICATE\n\
                    files fetch ADDRESS CERTIFICATE NAME MOVES";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["serve", "kernel", _, address, root, certificate] => {
            serve_by_kernel(address.parse()?, root, certificate)
        }
        ["serve", via, device, address, root, certificate] => {
            serve((via, device), address.parse()?, root, certificate)
        }
        ["fetch", address, certificate, name, moves] => {
            fetch(address.parse()?, certificate, name, moves.parse()?)
        }
        _ => Err(HELP.into()),
    }
}

fn serve(
    (via, device): (&str, &str),
    local: SocketAddr,
    root: &str,
    certificate: &str,
) -> Result<(), Box<dyn Error>> {
    let mut device = DeviceConfig::new(device, via.parse()?);
    device.take = format!("udp:{}", local.port()).parse()?;
    let device = Device::open(&device)?;
    let (net, engine) = Net::over(&Config::live(), &NetConfig::default(), &mut [device])?;
    let group = EndpointGroup::new(&net, local, EndpointGroup::ID_BYTES)?;
    engine.control().set("flow_key", &group.flow_key())?;
    let (config, der) = tls::server()?;
    let server = serve::Server::start(&net, &group, root.as_ref(), &config)?;
    std::fs::write(certificate, der)?;
    let (stopper, mut signals) = (engine.stopper(), Signals::new([SIGINT, SIGTERM])?);
    std::thread::spawn(move || signals.forever().for_each(|_| stopper.stop()));
    engine.run()?;
    for (cpu, counts) in server.end() {
        println!("CPU {cpu}: {} connections, {:?}", counts.connections, counts.socket);
    }
    Ok(())
}

/// Serves files over the kernel's sockets, to compare with.
fn serve_by_kernel(local: SocketAddr, root: &str, certificate: &str) -> Result<(), Box<dyn Error>> {
    let (config, der) = tls::server()?;
    let threads = serve::by_kernel(local, root.as_ref(), &config)?;
    std::fs::write(certificate, der)?;
    for thread in threads {
        thread.join().map_err(|_| "an endpoint's thread has panicked")??;
    }
    Ok(())
}

fn fetch(
    server: SocketAddr,
    certificate: &str,
    name: &str,
    moves: u32,
) -> Result<(), Box<dyn Error>> {
    let der = std::fs::read(Path::new(certificate))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let fetched = runtime.block_on(async {
        let any: SocketAddr = if server.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse()?;
        let mut endpoint = quinn::Endpoint::client(any)?;
        endpoint.set_default_client_config(tls::client(&der)?);
        let began = Instant::now();
        let fetched = fetch::fetch(&endpoint, server, name, moves).await?;
        let seconds = began.elapsed().as_secs_f64();
        println!("{} bytes in {seconds:.3} s, {} moves", fetched.len, fetched.moves);
        Ok::<_, Box<dyn Error>>(fetched)
    })?;
    println!("{}", fetched.sha256.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    Ok(())
}
