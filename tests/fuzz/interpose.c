/* Intercepts the calls that change files under one directory.
 *
 * LD_PRELOAD this library; it does nothing until fuzz_arm() is called.  Each mutating call on a path
 * under the root has a number, counted from 1.  The library can kill the process before call N, let
 * call N fail, hold the process before a call on a certain path, or record every call with its data.
 *
 * Record format, one per call: "NUMBER\tOP\tINODE\tOFFSET\tLENGTH\tPATH\tSECOND PATH\n", then LENGTH
 * bytes of data.  Only an operation that succeeded is recorded.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum mode { OFF, COUNT, KILL, FAIL_ONE, FAIL_REST, HALF, HOLD };

static enum mode mode = OFF;
static long target, count;
static int failure = ENOSPC;
static int record_fd = -1, notify_fd = -1, release_fd = -1;
static char root[PATH_MAX], pattern[PATH_MAX];
static size_t root_length;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Interface for ctypes -------------------------------------------------------------------- */

void fuzz_arm(const char *directory, int how, long number, int error) {
    snprintf(root, sizeof root, "%s", directory);
    root_length = strlen(root);
    target = number;
    failure = error;
    count = 0;
    mode = (enum mode)how;
}

void fuzz_record(int fd) { record_fd = fd; }

void fuzz_hold(const char *part_of_path, int notify, int release) {
    snprintf(pattern, sizeof pattern, "%s", part_of_path);
    notify_fd = notify;
    release_fd = release;
}

long fuzz_count(void) { return count; }

void fuzz_disarm(void) { mode = OFF; }

/* Paths ----------------------------------------------------------------------------------- */

static int is_below(const char *path) {
    return strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || path[root_length] == 0);
}

static int path_of_fd(int fd, char *found) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, found, PATH_MAX - 1);
    found[length < 0 ? 0 : length] = 0;
    return length > 0;
}

/* 1 if the path is below the root; `found` is its absolute form. */
static int resolve(int dirfd, const char *path, char *found) {
    if (mode == OFF || path == NULL)
        return 0;
    if (path[0] == '/') {
        snprintf(found, PATH_MAX, "%s", path);
    } else {
        char base[PATH_MAX];
        if (dirfd == AT_FDCWD ? getcwd(base, sizeof base) == NULL : !path_of_fd(dirfd, base))
            return 0;
        if ((size_t)snprintf(found, PATH_MAX, "%s/%s", base, path) >= PATH_MAX)
            return 0;
    }
    return is_below(found);
}

/* 1 if the descriptor is of a file below the root that still has a name. */
static int tracked(int fd, char *found, struct stat *about) {
    if (mode == OFF || fd == record_fd || !path_of_fd(fd, found) || !is_below(found))
        return 0;
    return fstat(fd, about) == 0 && about->st_nlink > 0 && (S_ISREG(about->st_mode) || S_ISDIR(about->st_mode));
}

/* Points ---------------------------------------------------------------------------------- */

static void hold(const char *path) {
    char byte = 'h';
    if (strstr(path, pattern) == NULL || notify_fd < 0)
        return;
    int notify = notify_fd;
    notify_fd = -1;
    while (syscall(SYS_write, notify, &byte, 1) < 0 && errno == EINTR) {}
    while (syscall(SYS_read, release_fd, &byte, 1) < 0 && errno == EINTR) {}
}

/* Before a mutating call: 0 to go on, an errno to fail with, -1 for half a write. Takes the lock. */
static int enter(const char *path) {
    pthread_mutex_lock(&lock);
    count++;
    if (mode == HOLD)
        hold(path);
    if (mode == KILL && count == target)
        for (;;)
            syscall(SYS_kill, getpid(), SIGKILL);
    if ((mode == FAIL_ONE && count == target) || (mode == FAIL_REST && count >= target))
        return failure;
    if (mode == HALF && count >= target)
        return count == target ? -1 : failure;
    return 0;
}

static void leave(void) { pthread_mutex_unlock(&lock); }

static void put(const char *data, size_t length) {
    while (length > 0) {
        ssize_t done = syscall(SYS_write, record_fd, data, length);
        if (done <= 0)
            abort();
        data += done;
        length -= (size_t)done;
    }
}

static void record(const char *op, unsigned long inode, long offset, const char *data, size_t length,
                   const char *path, const char *second) {
    char line[2 * PATH_MAX + 200];
    if (record_fd < 0)
        return;
    int size = snprintf(line, sizeof line, "%ld\t%s\t%lu\t%ld\t%zu\t%s\t%s\n", count, op, inode, offset, length, path, second);
    put(line, (size_t)size);
    put(data, length);
}

static unsigned long inode_of(const char *path) {
    struct stat about;
    return lstat(path, &about) == 0 ? (unsigned long)about.st_ino : 0;
}

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (found == NULL)
        abort();
    return found;
}

/* Opening --------------------------------------------------------------------------------- */

/* Whether opening changes a file: it creates one or empties one that has content. */
static int changes(const char *path, int flags) {
    struct stat about;
    if ((flags & O_TMPFILE) == O_TMPFILE)
        return 0;
    if (stat(path, &about) != 0)
        return (flags & O_CREAT) != 0;
    return (flags & O_TRUNC) && S_ISREG(about.st_mode) && about.st_size > 0;
}

static void opened(int fd, const char *path, int existed) {
    struct stat about;
    if (fd >= 0 && fstat(fd, &about) == 0)
        record(existed ? "truncate" : "create", (unsigned long)about.st_ino, 0, "", 0, path, "");
}

#define OPEN_BODY(dirfd, call)                                                                    \
    char found[PATH_MAX];                                                                         \
    mode_t permissions = 0;                                                                       \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                          \
        va_list rest;                                                                             \
        va_start(rest, flags);                                                                    \
        permissions = va_arg(rest, mode_t);                                                       \
        va_end(rest);                                                                             \
    }                                                                                             \
    if (!resolve(dirfd, path, found) || !changes(found, flags))                                   \
        return call;                                                                              \
    int existed = access(found, F_OK) == 0, error = enter(found), fd = -1;                        \
    if (error > 0) {                                                                              \
        errno = error;                                                                            \
    } else {                                                                                      \
        fd = call;                                                                                \
        int kept = errno;                                                                         \
        opened(fd, found, existed);                                                               \
        errno = kept;                                                                             \
    }                                                                                             \
    leave();                                                                                      \
    return fd;

int open(const char *path, int flags, ...) { OPEN_BODY(AT_FDCWD, REAL(open)(path, flags, permissions)) }
int open64(const char *path, int flags, ...) { OPEN_BODY(AT_FDCWD, REAL(open64)(path, flags, permissions)) }
int openat(int dirfd, const char *path, int flags, ...) { OPEN_BODY(dirfd, REAL(openat)(dirfd, path, flags, permissions)) }
int openat64(int dirfd, const char *path, int flags, ...) { OPEN_BODY(dirfd, REAL(openat64)(dirfd, path, flags, permissions)) }

int creat(const char *path, mode_t permissions) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, permissions); }
int creat64(const char *path, mode_t permissions) { return creat(path, permissions); }

static FILE *open_stream(const char *path, const char *how, FILE *(*call)(const char *, const char *)) {
    char found[PATH_MAX];
    int flags = how[0] == 'w' ? O_CREAT | O_TRUNC : how[0] == 'a' ? O_CREAT : 0;
    if (!resolve(AT_FDCWD, path, found) || !changes(found, flags))
        return call(path, how);
    FILE *stream = NULL;
    int existed = access(found, F_OK) == 0, error = enter(found);
    if (error > 0) {
        errno = error;
    } else {
        stream = call(path, how);
        opened(stream ? fileno(stream) : -1, found, existed);
    }
    leave();
    return stream;
}

FILE *fopen(const char *path, const char *how) { return open_stream(path, how, REAL(fopen)); }
FILE *fopen64(const char *path, const char *how) { return open_stream(path, how, REAL(fopen64)); }

/* Writing --------------------------------------------------------------------------------- */

static void wrote(int fd, struct stat *about, const char *data, ssize_t done, long offset, const char *path) {
    int kept = errno;
    if (done > 0) {
        if (offset < 0)
            offset = (long)lseek(fd, 0, SEEK_CUR) - done;
        record("write", (unsigned long)about->st_ino, offset, data, (size_t)done, path, "");
    }
    errno = kept;
}

#define WRITE_BODY(call, half, data, offset)                                                      \
    char found[PATH_MAX];                                                                         \
    struct stat about;                                                                            \
    if (!tracked(fd, found, &about))                                                              \
        return call;                                                                              \
    int error = enter(found);                                                                     \
    ssize_t done = -1;                                                                            \
    if (error > 0) {                                                                              \
        errno = error;                                                                            \
    } else {                                                                                      \
        done = error < 0 ? half : call;                                                           \
        wrote(fd, &about, data, done, offset, found);                                             \
    }                                                                                             \
    leave();                                                                                      \
    return done;

ssize_t write(int fd, const void *data, size_t size) {
    WRITE_BODY(REAL(write)(fd, data, size), REAL(write)(fd, data, size / 2), data, -1)
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    WRITE_BODY(REAL(pwrite)(fd, data, size, offset), REAL(pwrite)(fd, data, size / 2, offset), data, offset)
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    WRITE_BODY(REAL(pwrite64)(fd, data, size, offset), REAL(pwrite64)(fd, data, size / 2, offset), data, offset)
}

/* One vector element at a time: a caller has to accept a short count anyway. */
ssize_t writev(int fd, const struct iovec *vectors, int number) {
    char found[PATH_MAX];
    struct stat about;
    if (!tracked(fd, found, &about))
        return REAL(writev)(fd, vectors, number);
    for (int i = 0; i < number; i++)
        if (vectors[i].iov_len > 0)
            return write(fd, vectors[i].iov_base, vectors[i].iov_len);
    return 0;
}

/* Copies inside the kernel become ordinary writes: Python and Rust fall back on EINVAL. */
ssize_t sendfile(int fd, int source, off_t *offset, size_t size) {
    char found[PATH_MAX];
    struct stat about;
    if (!tracked(fd, found, &about))
        return REAL(sendfile)(fd, source, offset, size);
    errno = EINVAL;
    return -1;
}
ssize_t sendfile64(int fd, int source, off64_t *offset, size_t size) { return sendfile(fd, source, offset, size); }
ssize_t copy_file_range(int source, off64_t *from, int fd, off64_t *to, size_t size, unsigned flags) {
    char found[PATH_MAX];
    struct stat about;
    if (!tracked(fd, found, &about))
        return (ssize_t)syscall(SYS_copy_file_range, source, from, fd, to, size, flags);
    errno = EINVAL;
    return -1;
}

/* Buffered streams write inside libc, where nothing can be intercepted: bypass their buffer. */
size_t fwrite(const void *data, size_t size, size_t number, FILE *stream) {
    char found[PATH_MAX];
    struct stat about;
    size_t length = size * number, done = 0;
    if (mode == OFF || length == 0 || !tracked(fileno(stream), found, &about))
        return REAL(fwrite)(data, size, number, stream);
    fflush(stream);
    while (done < length) {
        ssize_t part = write(fileno(stream), (const char *)data + done, length - done);
        if (part <= 0)
            break;
        done += (size_t)part;
    }
    fseeko(stream, 0, SEEK_CUR);
    return done / size;
}

/* Other calls on descriptors -------------------------------------------------------------- */

#define FD_BODY(call, op, length)                                                                 \
    char found[PATH_MAX];                                                                         \
    struct stat about;                                                                            \
    if (!tracked(fd, found, &about))                                                              \
        return call;                                                                              \
    int error = enter(found), done = -1;                                                          \
    if (error > 0) {                                                                              \
        errno = error;                                                                            \
    } else {                                                                                      \
        done = call;                                                                              \
        if (done == 0)                                                                            \
            record(op, (unsigned long)about.st_ino, (long)(length), "", 0, found, "");            \
    }                                                                                             \
    leave();                                                                                      \
    return done;

int fsync(int fd) { FD_BODY(REAL(fsync)(fd), "sync", 0) }
int fdatasync(int fd) { FD_BODY(REAL(fdatasync)(fd), "sync", 0) }
int ftruncate(int fd, off_t size) { FD_BODY(REAL(ftruncate)(fd, size), "truncate", size) }
int ftruncate64(int fd, off64_t size) { FD_BODY(REAL(ftruncate64)(fd, size), "truncate", size) }
int posix_fallocate64(int fd, off64_t offset, off64_t size) {
    FD_BODY(REAL(posix_fallocate64)(fd, offset, size), "extend", offset + size)
}
int posix_fallocate(int fd, off_t offset, off_t size) { FD_BODY(REAL(posix_fallocate)(fd, offset, size), "extend", offset + size) }
int flock(int fd, int how) { FD_BODY((int)syscall(SYS_flock, fd, how), "flock", how) }

/* Names ----------------------------------------------------------------------------------- */

#define NAME_BODY(dirfd, path, seconddir, second, call, op)                                       \
    char found[PATH_MAX], other[PATH_MAX] = "";                                                   \
    int is_here = resolve(dirfd, path, found);                                                    \
    is_here |= resolve(seconddir, second, other);                                                 \
    if (!is_here)                                                                                 \
        return call;                                                                              \
    int error = enter(found), done = -1;                                                          \
    unsigned long inode = inode_of(found);                                                        \
    if (error > 0) {                                                                              \
        errno = error;                                                                            \
    } else {                                                                                      \
        done = call;                                                                              \
        int kept = errno;                                                                         \
        if (done == 0)                                                                            \
            record(op, inode ? inode : inode_of(found), 0, "", 0, found, other);                  \
        errno = kept;                                                                             \
    }                                                                                             \
    leave();                                                                                      \
    return done;

static const char *const none = NULL;

int rename(const char *from, const char *to) { NAME_BODY(AT_FDCWD, from, AT_FDCWD, to, REAL(rename)(from, to), "rename") }
int renameat(int fromdir, const char *from, int todir, const char *to) {
    NAME_BODY(fromdir, from, todir, to, REAL(renameat)(fromdir, from, todir, to), "rename")
}
int renameat2(int fromdir, const char *from, int todir, const char *to, unsigned flags) {
    NAME_BODY(fromdir, from, todir, to, (int)syscall(SYS_renameat2, fromdir, from, todir, to, flags), "rename")
}
int link(const char *from, const char *to) { NAME_BODY(AT_FDCWD, from, AT_FDCWD, to, REAL(link)(from, to), "link") }
int linkat(int fromdir, const char *from, int todir, const char *to, int flags) {
    NAME_BODY(fromdir, from, todir, to, REAL(linkat)(fromdir, from, todir, to, flags), "link")
}
int unlink(const char *path) { NAME_BODY(AT_FDCWD, path, 0, none, REAL(unlink)(path), "unlink") }
int unlinkat(int dirfd, const char *path, int flags) {
    NAME_BODY(dirfd, path, 0, none, REAL(unlinkat)(dirfd, path, flags), (flags & AT_REMOVEDIR) ? "rmdir" : "unlink")
}
int remove(const char *path) { NAME_BODY(AT_FDCWD, path, 0, none, REAL(remove)(path), "unlink") }
int rmdir(const char *path) { NAME_BODY(AT_FDCWD, path, 0, none, REAL(rmdir)(path), "rmdir") }
int mkdir(const char *path, mode_t permissions) {
    NAME_BODY(AT_FDCWD, path, 0, none, REAL(mkdir)(path, permissions), "mkdir")
}
int mkdirat(int dirfd, const char *path, mode_t permissions) {
    NAME_BODY(dirfd, path, 0, none, REAL(mkdirat)(dirfd, path, permissions), "mkdir")
}
int truncate(const char *path, off_t size) { NAME_BODY(AT_FDCWD, path, 0, none, REAL(truncate)(path, size), "truncate") }
int symlink(const char *to, const char *path) { NAME_BODY(AT_FDCWD, path, 0, none, REAL(symlink)(to, path), "symlink") }
