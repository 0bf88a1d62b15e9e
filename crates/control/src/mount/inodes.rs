//! Inode numbers for the paths of the tree.

use std::collections::HashMap;
use std::sync::Arc;

use fuser::INodeNo;

/// Paths seen so far, each with a permanent number; at most as many as the tree has.
pub(super) struct Inodes {
    /// Paths by number: that of number n is at n - 1, and the root is the first.
    paths: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, INodeNo>,
}

impl Inodes {
    pub(super) fn new() -> Self {
        let mut inodes = Self { paths: Vec::new(), numbers: HashMap::new() };
        let root = inodes.number("");
        debug_assert_eq!(root, INodeNo::ROOT);
        inodes
    }

    /// Number of a path that is in the tree.
    pub(super) fn number(&mut self, path: &str) -> INodeNo {
        if let Some(number) = self.numbers.get(path) {
            return *number;
        }
        let path: Arc<str> = path.into();
        self.paths.push(Arc::clone(&path));
        let number = INodeNo(self.paths.len() as u64);
        self.numbers.insert(path, number);
        number
    }

    /// Path of a number.
    pub(super) fn path(&self, number: INodeNo) -> Option<Arc<str>> {
        let index = usize::try_from(number.0).ok()?.checked_sub(1)?;
        self.paths.get(index).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_inodes_are_stable() {
        let mut inodes = Inodes::new();
        let numbers = ["", "sys", "proc", "sys"].map(|path| inodes.number(path));
        assert_eq!(numbers, [1, 2, 3, 2].map(INodeNo));
        let paths = [1, 3, 4, 0, u64::MAX].map(|number| inodes.path(INodeNo(number)));
        assert_eq!(
            paths.map(|path| path.map(|path| path.to_string())),
            [Some(String::new()), Some("proc".to_owned()), None, None, None]
        );
    }
}
