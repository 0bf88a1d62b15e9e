//! An authoritative name server.

mod answer;
mod body;
mod prepared;
mod zone;

fn main() {
    let file = std::env::args_os().nth(1).unwrap_or_default();
    let contents = zone::Contents::read(file.as_ref()).unwrap();
    let zone = prepared::Zone::new(&contents);
    let mut room = [0; 1500];
    println!("{} {:?}", zone.names_len(), answer::answer(&zone, &[], &mut room));
}
