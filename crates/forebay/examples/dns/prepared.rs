//! Zone prepared for look-ups: the answer for each name and type (RFC 1034, 4.3.2).

use std::collections::HashMap;

use crate::body::{Body, Composer, Owner, Question, Section};
use crate::zone::{Contents, Set, Sets, WireName, is_of_alias, is_within, rtype, suffixes};

/// Upper bound on aliases followed for an answer.
const ALIASES_MAX: usize = 20;

/// The response code of a name that does not exist.
const NXDOMAIN: u8 = 3;

/// Type looked up for a name that has no records of the type in the question.
const NO_TYPE: u16 = 0;

/// A zone's answers.
pub(crate) struct Zone {
    apex: WireName,
    nodes: HashMap<WireName, Node>,
    nodata: Body,
    nxdomain: Body,
}

/// Answers at one name.
struct Node {
    /// Answers by type, ANY included.
    answers: Vec<(u16, Body)>,
    /// Body for all other types; `None`: the zone's `nodata`.
    others: Option<Body>,
    /// True at a delegation: all names below get `others` too.
    is_cut: bool,
    /// Node that answers for nonexistent names below.
    wildcard: Option<Box<Node>>,
}

impl Zone {
    pub(crate) fn new(contents: &Contents) -> Self {
        let apex = contents.apex.clone();
        let preparing = Preparing { contents };
        let is_ours = |name: &WireName| contents.cut(name).is_none_or(|cut| *cut == **name);
        let names = contents.names.iter().filter(|(name, _)| is_ours(name));
        let nodes = names.map(|(name, sets)| (name.clone(), preparing.node(name, sets)));
        let nodes = nodes.collect();
        let (nodata, nxdomain) = (preparing.negative(0), preparing.negative(NXDOMAIN));
        Self { apex, nodes, nodata, nxdomain }
    }

    /// Answer for a name in lower case; `None` if the name is not in this zone.
    pub(crate) fn find(&self, name: &[u8], rtype: u16) -> Option<&Body> {
        match self.nodes.get(name) {
            Some(node) => Some(self.at(node, rtype)),
            None => self.find_above(name, rtype),
        }
    }

    fn at<'a>(&'a self, node: &'a Node, rtype: u16) -> &'a Body {
        let own = node.answers.iter().find(|(own, _)| *own == rtype).map(|(_, body)| body);
        own.or(node.others.as_ref()).unwrap_or(&self.nodata)
    }

    /// Descends from the apex to the closest existing name. The depth is bounded by the zone, not
    /// by the question.
    fn find_above(&self, name: &[u8], rtype: u16) -> Option<&Body> {
        let mut lens = [0_u8; 128];
        let mut labels = 0;
        let mut is_ours = *self.apex == [0];
        for suffix in suffixes(name) {
            if *suffix == *self.apex {
                is_ours = true;
                break;
            }
            lens[labels] = suffix[0];
            labels += 1;
        }
        let mut closest = self.nodes.get(&self.apex).filter(|_| is_ours)?;
        let mut len = self.apex.len();
        for label_len in lens[..labels].iter().rev() {
            len += 1 + usize::from(*label_len);
            let Some(node) = self.nodes.get(&name[name.len() - len..]) else { break };
            closest = node;
            if node.is_cut {
                return Some(self.at(node, NO_TYPE));
            }
        }
        let wildcard = closest.wildcard.as_ref().map(|wildcard| self.at(wildcard, rtype));
        Some(wildcard.unwrap_or(&self.nxdomain))
    }
}

/// Composes a zone's answers.
struct Preparing<'a> {
    contents: &'a Contents,
}

impl<'a> Preparing<'a> {
    fn node(&self, name: &'a [u8], sets: &'a Sets) -> Node {
        if self.contents.cut(name).is_some() {
            return self.delegation(name, sets);
        }
        let wildcard = self.contents.wildcard(name);
        let wildcard = wildcard
            .map(|(wildcard, sets)| Box::new(self.answers(wildcard, sets, Question::Under(name))));
        Node { wildcard, ..self.answers(name, sets, Question::Exactly(name)) }
    }

    /// Answers at an authoritative name.
    fn answers(&self, name: &[u8], sets: &Sets, question: Question<'_>) -> Node {
        let is_alias = sets.contains_key(&rtype::CNAME);
        let mut types: Vec<u16> = sets.keys().copied().collect();
        let mut others = None;
        if is_alias {
            types.extend(self.types_behind(name));
            types.extend([rtype::RRSIG, rtype::NSEC]);
            types.sort_unstable();
            types.dedup();
            others = Some(self.answer(name, NO_TYPE, question));
        }
        let of_type = |rtype| (rtype, self.answer(name, rtype, question));
        let mut answers: Vec<_> = types.iter().map(|rtype| of_type(*rtype)).collect();
        // The minimal answer to ANY: one set (RFC 8482, 4.1).
        if let Some(first) = sets.keys().next() {
            answers.push((rtype::ANY, self.answer(name, *first, question)));
        }
        Node { answers, others, is_cut: false, wildcard: None }
    }

    /// Answer for a delegated name: a referral, except for the DS record, which belongs to this
    /// zone.
    fn delegation(&self, name: &[u8], sets: &Sets) -> Node {
        let mut referral = Composer::new(Question::Under(name));
        self.add_referral(&mut referral, name);
        let ds = match sets.get(&rtype::DS) {
            Some(_) => self.set(name, rtype::DS, Question::Exactly(name)),
            None => self.negative(0),
        };
        let others = Some(referral.finish(false, 0));
        Node { answers: vec![(rtype::DS, ds)], others, is_cut: true, wildcard: None }
    }

    fn set(&self, name: &[u8], rtype: u16, question: Question<'_>) -> Body {
        let mut composer = Composer::new(question);
        let set = &self.contents.names[name][&rtype];
        composer.add(Section::Answer, Owner::Asked, (rtype, set), None, true);
        self.add_additional(&mut composer, (rtype, set), None);
        composer.finish(true, 0)
    }

    /// A negative answer: the zone's SOA record only (RFC 2308, 2).
    fn negative(&self, rcode: u8) -> Body {
        let mut composer = Composer::new(Question::Under(&self.contents.apex));
        self.add_negative(&mut composer);
        composer.finish(true, rcode)
    }

    /// Answer for a type at an authoritative name: the set, or the target of the name's alias.
    fn answer(&self, name: &[u8], rtype: u16, question: Question<'_>) -> Body {
        if self.contents.has(name, rtype) {
            return self.set(name, rtype, question);
        }
        if is_of_alias(&rtype) || !self.contents.has(name, rtype::CNAME) {
            return self.negative(0);
        }
        let mut composer = Composer::new(question);
        let mut owner = Owner::Asked;
        let mut visited = vec![name];
        let mut at = name;
        while let Some(alias) = self.contents.names[at].get(&rtype::CNAME) {
            composer.add(Section::Answer, owner, (rtype::CNAME, alias), None, true);
            let target: &[u8] = &alias.rdata[0];
            owner = Owner::Named(target);
            at = match self.place(target) {
                Place::Elsewhere => return composer.finish(true, 0),
                Place::Delegated(cut) => {
                    self.add_referral(&mut composer, cut);
                    return composer.finish(true, 0);
                }
                Place::Nowhere => {
                    self.add_negative(&mut composer);
                    return composer.finish(true, NXDOMAIN);
                }
                Place::Here(at) => at,
            };
            if visited.contains(&at) || visited.len() >= ALIASES_MAX {
                return composer.finish(true, 0);
            }
            visited.push(at);
        }
        match self.contents.names[at].get(&rtype) {
            Some(set) => {
                composer.add(Section::Answer, owner, (rtype, set), None, true);
                self.add_additional(&mut composer, (rtype, set), None);
            }
            None => self.add_negative(&mut composer),
        }
        composer.finish(true, 0)
    }

    /// Types of the name that a chain of aliases ends at.
    fn types_behind(&self, name: &[u8]) -> Vec<u16> {
        let mut at = name;
        for _ in 0..=ALIASES_MAX {
            let sets = &self.contents.names[at];
            let Some(alias) = sets.get(&rtype::CNAME) else {
                return sets.keys().copied().collect();
            };
            let Place::Here(next) = self.place(&alias.rdata[0]) else { break };
            at = next;
        }
        Vec::new()
    }

    fn place<'n>(&'n self, name: &'n [u8]) -> Place<'n> {
        if !is_within(name, &self.contents.apex) {
            return Place::Elsewhere;
        }
        if let Some(cut) = self.contents.cut(name) {
            return Place::Delegated(cut);
        }
        self.contents.stands_for(name).map_or(Place::Nowhere, |(at, _)| Place::Here(at))
    }

    fn add_negative(&self, composer: &mut Composer) {
        let ttl_s = Some(self.contents.negative_ttl_s());
        let owner = Owner::Named(&self.contents.apex);
        composer.add(Section::Authority, owner, (rtype::SOA, self.contents.soa()), ttl_s, true);
    }

    fn add_referral(&self, composer: &mut Composer, cut: &[u8]) {
        let servers = (rtype::NS, &self.contents.names[cut][&rtype::NS]);
        composer.add(Section::Authority, Owner::Named(cut), servers, None, true);
        self.add_additional(composer, servers, Some(cut));
    }

    /// Adds the addresses of the hosts that records name. Addresses below the delegation are not
    /// available elsewhere (RFC 9471): without them the answer is truncated. They come first, then
    /// hosts with few addresses, of which most fit.
    fn add_additional(&self, composer: &mut Composer, sets: (u16, &Set), cut: Option<&[u8]>) {
        let is_glue = |host: &[u8]| cut.is_some_and(|cut| is_within(host, cut));
        let addresses = |host: &[u8]| {
            let sets = self.contents.stands_for(host).map(|(_, sets)| sets);
            [rtype::A, rtype::AAAA].map(|rtype| (rtype, sets.and_then(|sets| sets.get(&rtype))))
        };
        let mut named: Vec<&[u8]> = Vec::new();
        for host in hosts(sets.0, sets.1) {
            if !named.contains(&host) {
                named.push(host);
            }
        }
        named.sort_by_key(|host| {
            let records = addresses(host).into_iter().filter_map(|(_, set)| set);
            (!is_glue(host), records.map(|set| set.rdata.len()).sum::<usize>())
        });
        for host in named {
            for (rtype, set) in addresses(host) {
                let Some(set) = set else { continue };
                let owner = Owner::Named(host);
                composer.add(Section::Additional, owner, (rtype, set), None, is_glue(host));
            }
        }
    }
}

/// Target of an alias.
enum Place<'a> {
    /// A name of this zone, or the wildcard that stands for it.
    Here(&'a [u8]),
    /// A nonexistent name of this zone.
    Nowhere,
    /// A name at or below this delegation.
    Delegated(&'a [u8]),
    /// A name outside the zone.
    Elsewhere,
}

/// Hosts named by records.
fn hosts(rtype: u16, set: &Set) -> Vec<&[u8]> {
    let skip_bytes = match rtype {
        rtype::NS => 0,
        rtype::MX => 2,
        rtype::SRV => 6,
        _ => return Vec::new(),
    };
    set.rdata.iter().filter_map(|rdata| rdata.get(skip_bytes..)).collect()
}
