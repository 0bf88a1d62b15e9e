//! FUSE requests for the mounted tree, and their answers.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use forebay_sys::{self as sys, User};
use fuser::{
    BsdFileFlags, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, OpenAccMode, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow,
    WriteFlags,
};

use super::MountedKnobs;
use super::inodes::Inodes;
use super::like::Like;
use super::readings::Readings;
use crate::tree::EntryKind;

/// Time for which the kernel caches attributes: none, since a write would move the file's end in
/// its cache.
const REMEMBERED: Duration = Duration::ZERO;

/// Generation of all inode numbers, which are never reused.
const GENERATION: Generation = Generation(0);

const PERMISSIONS: u32 = 0o7777;
const ANYBODY_READS: u16 = 0o444;
const ANYBODY_WRITES: u16 = 0o222;

const BLOCK_BYTES: u32 = 4096;
const NAME_BYTES_MAX: u32 = 255;

/// File system of the tree.
pub(super) struct Files {
    knobs: MountedKnobs,
    inodes: Mutex<Inodes>,
    readings: Mutex<Readings>,
    /// Number of files that have been opened.
    opened: AtomicU64,
    owner: User,
    since: SystemTime,
}

impl Files {
    pub(super) fn new(knobs: MountedKnobs) -> Self {
        Self {
            knobs,
            inodes: Mutex::new(Inodes::new()),
            readings: Mutex::new(Readings::new()),
            opened: AtomicU64::new(0),
            owner: sys::user(),
            since: SystemTime::now(),
        }
    }

    fn path(&self, inode: INodeNo) -> Result<Arc<str>, fuser::Errno> {
        lock(&self.inodes).path(inode).ok_or(fuser::Errno::ENOENT)
    }

    fn like(&self, inode: INodeNo) -> Like {
        self.path(inode).map_or(Like::Sysfs, |path| Like::of(&path))
    }

    fn kind(&self, path: &str) -> Result<EntryKind, fuser::Errno> {
        if path.is_empty() {
            return Ok(EntryKind::Directory);
        }
        let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
        let entries = self.knobs.ask(|control| control.entries(directory))?;
        let entry = entries.into_iter().find(|entry| entry.name == name);
        Ok(entry.ok_or(fuser::Errno::ENOENT)?.kind)
    }

    fn attributes(&self, path: &str) -> Result<FileAttr, fuser::Errno> {
        let like = Like::of(path);
        let (kind, perm, size, nlink) = match self.kind(path)? {
            EntryKind::File { mode } => (FileType::RegularFile, mode, like.size_bytes(), 1),
            EntryKind::Directory => {
                let entries = self.knobs.ask(|control| control.entries(path))?;
                let directories = entries.iter().filter(|entry| entry.kind == EntryKind::Directory);
                let links = like.directory_links(directories.count());
                (FileType::Directory, like.directory_mode(path), 0, links)
            }
        };
        Ok(FileAttr {
            ino: lock(&self.inodes).number(path),
            size,
            blocks: 0,
            atime: self.since,
            mtime: self.since,
            ctime: self.since,
            crtime: self.since,
            kind,
            perm,
            nlink,
            uid: self.owner.uid,
            gid: self.owner.gid,
            rdev: 0,
            blksize: like.block_bytes(),
            flags: 0,
        })
    }

    fn find(&self, parent: INodeNo, name: &OsStr) -> Result<FileAttr, fuser::Errno> {
        let directory = self.path(parent)?;
        let name = name.to_str().ok_or(fuser::Errno::ENOENT)?;
        self.attributes(&below(&directory, name))
    }

    /// Opens a file. The kernel has checked user and mode already, but lets root pass any mode.
    fn open_file(&self, inode: INodeNo, flags: OpenFlags) -> Result<FileHandle, fuser::Errno> {
        let path = self.path(inode)?;
        let EntryKind::File { mode } = self.kind(&path)? else {
            return Err(fuser::Errno::EISDIR);
        };
        let wanted = match flags.acc_mode() {
            OpenAccMode::O_RDONLY => [ANYBODY_READS].as_slice(),
            OpenAccMode::O_WRONLY => &[ANYBODY_WRITES],
            OpenAccMode::O_RDWR => &[ANYBODY_READS, ANYBODY_WRITES],
        };
        let is_allowed = wanted.iter().all(|bits| mode & bits != 0);
        if !is_allowed && !Like::of(&path).is_opened_in_vain() {
            return Err(fuser::Errno::EACCES);
        }
        Ok(FileHandle(self.opened.fetch_add(1, Ordering::Relaxed)))
    }

    fn read_file(
        &self,
        inode: INodeNo,
        file: FileHandle,
        offset: u64,
        size_bytes: u32,
    ) -> Result<Vec<u8>, fuser::Errno> {
        let path = self.path(inode)?;
        if Like::of(&path).is_read_at_start() && offset > 0 {
            return Ok(Vec::new());
        }
        let text = || self.knobs.ask(|control| control.read(&path));
        lock(&self.readings).read(file, offset, size_bytes, text)
    }

    /// Writes to a file, and returns the number of bytes that were taken.
    fn write_file(&self, inode: INodeNo, offset: u64, data: &[u8]) -> Result<usize, fuser::Errno> {
        let path = self.path(inode)?;
        let like = Like::of(&path);
        if like == Like::Procfs {
            // A file of /proc without a write handler answers EIO (`proc_reg_write` in
            // fs/proc/inode.c).
            return Err(fuser::Errno::EIO);
        }
        if like.ignores(&path, offset) {
            return Ok(data.len());
        }
        let taken = like.taken(data);
        let written = self
            .knobs
            .ask(|control| control.write(&path, taken).map_err(|refused| refused.errno))?;
        Ok(written.len_bytes.min(taken.len()))
    }

    /// Accepts new sizes and times without effect, as sysfs does; refuses another mode or owner.
    fn set_attributes(
        &self,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<FileAttr, fuser::Errno> {
        let attributes = self.attributes(&self.path(inode)?)?;
        let is_same = mode.is_none_or(|mode| mode & PERMISSIONS == u32::from(attributes.perm))
            && uid.is_none_or(|uid| uid == attributes.uid)
            && gid.is_none_or(|gid| gid == attributes.gid);
        if is_same { Ok(attributes) } else { Err(fuser::Errno::EPERM) }
    }

    fn list(
        &self,
        inode: INodeNo,
        offset: u64,
        reply: &mut ReplyDirectory,
    ) -> Result<(), fuser::Errno> {
        let path = self.path(inode)?;
        let entries = self.knobs.ask(|control| control.entries(&path))?;
        let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
        let itself = [(".".to_owned(), &*path), ("..".to_owned(), parent)];
        let mut inodes = lock(&self.inodes);
        let itself = itself.map(|(name, path)| (inodes.number(path), FileType::Directory, name));
        let entries = entries.into_iter().map(|entry| {
            let kind = match entry.kind {
                EntryKind::Directory => FileType::Directory,
                EntryKind::File { .. } => FileType::RegularFile,
            };
            (inodes.number(&below(&path, &entry.name)), kind, entry.name)
        });
        let skipped = usize::try_from(offset).unwrap_or(usize::MAX);
        // An entry's offset is that of the entry behind it.
        for (next, (inode, kind, name)) in
            (1..).zip(itself.into_iter().chain(entries)).skip(skipped)
        {
            if reply.add(inode, next, kind, name) {
                break;
            }
        }
        Ok(())
    }
}

fn below(directory: &str, name: &str) -> String {
    if directory.is_empty() { name.to_owned() } else { format!("{directory}/{name}") }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Filesystem for Files {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.find(parent, name) {
            Ok(attributes) => reply.entry(&REMEMBERED, &attributes, GENERATION),
            Err(errno) => reply.error(errno),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.path(inode).and_then(|path| self.attributes(&path)) {
            Ok(attributes) => reply.attr(&REMEMBERED, &attributes),
            Err(errno) => reply.error(errno),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        _size: Option<u64>,
        _accessed: Option<TimeOrNow>,
        _modified: Option<TimeOrNow>,
        _changed: Option<SystemTime>,
        _: Option<FileHandle>,
        _created: Option<SystemTime>,
        _attributes_changed: Option<SystemTime>,
        _backed_up: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        match self.set_attributes(inode, mode, uid, gid) {
            Ok(attributes) => reply.attr(&REMEMBERED, &attributes),
            Err(errno) => reply.error(errno),
        }
    }

    fn open(&self, _: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        match self.open_file(inode, flags) {
            // Sizes are nominal: with direct I/O, every read and write comes here.
            Ok(file) => reply.opened(file, FopenFlags::FOPEN_DIRECT_IO),
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        file: FileHandle,
        offset: u64,
        size_bytes: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.read_file(inode, file, offset, size_bytes) {
            Ok(piece) => reply.data(&piece),
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.write_file(inode, offset, data) {
            Ok(len_bytes) => reply.written(u32::try_from(len_bytes).unwrap_or(u32::MAX)),
            Err(errno) => reply.error(errno),
        }
    }

    fn fsync(&self, _: &Request, inode: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.like(inode) {
            Like::Sysfs => reply.ok(),
            // Files of /proc have no fsync operation (`vfs_fsync_range` in fs/sync.c).
            Like::Procfs | Like::Sysctl => reply.error(fuser::Errno::EINVAL),
        }
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        file: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        lock(&self.readings).close(file);
        reply.ok();
    }

    fn readdir(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        match self.list(inode, offset, &mut reply) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        reply.statfs(0, 0, 0, 0, 0, BLOCK_BYTES, NAME_BYTES_MAX, BLOCK_BYTES);
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        _: &OsStr,
        _: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        reply.error(self.like(parent).no_file());
    }

    fn mknod(
        &self,
        _: &Request,
        parent: INodeNo,
        _: &OsStr,
        _: u32,
        _: u32,
        _: u32,
        reply: ReplyEntry,
    ) {
        reply.error(self.like(parent).nothing_new());
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, _: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(self.like(parent).nothing_new());
    }

    fn symlink(&self, _: &Request, parent: INodeNo, _: &OsStr, _: &Path, reply: ReplyEntry) {
        reply.error(self.like(parent).nothing_new());
    }

    fn link(&self, _: &Request, _: INodeNo, parent: INodeNo, _: &OsStr, reply: ReplyEntry) {
        reply.error(self.like(parent).nothing_new());
    }

    fn rename(
        &self,
        _: &Request,
        _: INodeNo,
        _: &OsStr,
        parent: INodeNo,
        _: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        reply.error(self.like(parent).nothing_new());
    }

    fn unlink(&self, _: &Request, parent: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(self.like(parent).no_removal());
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(self.like(parent).no_removal());
    }
}
