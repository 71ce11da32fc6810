/* A file system with faults, for one folder: preloaded into a process (LD_PRELOAD).
 *
 * Calls on paths below the folder are counted. The one with the number that is asked for fails with
 * an errno, alone or with all after it, or the process is killed (SIGKILL) before it. Quirks are
 * calls that always fail there: locks, links, fsync of folders, modes, ... */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { ONCE = 1, LASTING = 2, KILL = 3 };
enum { FLOCK, FOLDER_SYNC, SYMLINK, HARDLINK, CHMOD, RECORD_LOCK, FOLDER_OPEN, EXCHANGE, QUIRKS };

#define FDS 4096
static char folder[PATH_MAX];
static size_t length;
static unsigned char inside[FDS]; /* 1: a file below the folder, 2: a folder below it */
static int mode, number, at_call;
static int quirks[QUIRKS]; /* the errno of each, 0: it works */

struct shared { /* a forked child writes it, its parent reads it */
  int calls;
  char what[256];
};
static struct shared *shared;

__attribute__((constructor)) static void begin(void) {
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

void odd_disk(const char *path, int kind, int at, int error, const int *errors) {
  snprintf(folder, sizeof folder, "%s", path);
  length = strlen(folder);
  mode = kind, at_call = at, number = error;
  memcpy(quirks, errors, sizeof quirks);
  memset(inside, 0, sizeof inside);
  memset(shared, 0, sizeof *shared);
}
int odd_disk_calls(void) { return shared->calls; }
const char *odd_disk_fault(void) { return shared->what; }

static int below(const char *path) {
  return length && path && !strncmp(path, folder, length);
}
static int tracked(int fd) { return length && fd >= 0 && fd < FDS ? inside[fd] : 0; }
static int below_at(int fd, const char *path) {
  return path && (path[0] == '/' || fd == AT_FDCWD ? below(path) : tracked(fd));
}

/* Count a call; return whether it is to fail, with errno set. */
static int faulty(const char *name, const char *path) {
  int now = __sync_fetch_and_add(&shared->calls, 1);
  if (!mode || now < at_call || (mode != LASTING && now > at_call)) return 0;
  if (now == at_call) snprintf(shared->what, sizeof shared->what, "%s %s", name, path ? path : "");
  if (mode == KILL) kill(getpid(), SIGKILL);
  errno = number;
  return 1;
}
static int lacking(int quirk) {
  if (quirks[quirk]) errno = quirks[quirk];
  return quirks[quirk];
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static void track(int fd, const char *path) {
  struct stat about;
  if (fd < 0 || fd >= FDS) return;
  inside[fd] = path && !fstat(fd, &about) ? (S_ISDIR(about.st_mode) ? 2 : 1) : 0;
}

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); \
    va_list more; \
    va_start(more, flags); \
    mode_t bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more); \
    int in = below(path); \
    if (in && faulty("open", path)) return -1; \
    int fd = real(path, flags, bits); \
    track(fd, in ? path : NULL); \
    if (in && fd >= 0 && inside[fd] == 2 && lacking(FOLDER_OPEN)) { \
      int error = errno; \
      close(fd); \
      errno = error; \
      return -1; \
    } \
    return fd; \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
  int name(int at, const char *path, int flags, ...) { \
    REAL(name); \
    va_list more; \
    va_start(more, flags); \
    mode_t bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more); \
    int in = below_at(at, path); \
    if (in && faulty("openat", path)) return -1; \
    int fd = real(at, path, flags, bits); \
    track(fd, in ? path : NULL); \
    return fd; \
  }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name) \
  FILE *name(const char *path, const char *how) { \
    REAL(name); \
    int in = below(path); \
    if (in && faulty("fopen", path)) return NULL; \
    FILE *file = real(path, how); \
    if (file) track(fileno(file), in ? path : NULL); \
    return file; \
  }
FOPEN(fopen)
FOPEN(fopen64)

/* filelock exchanges two names so, to take the lock of a process that died. */
long syscall(long call, ...) {
  REAL(syscall);
  va_list more;
  va_start(more, call);
  long a[6];
  for (int i = 0; i < 6; i++) a[i] = va_arg(more, long);
  va_end(more);
  if (call == SYS_renameat2 && below((const char *)a[1]) && lacking(EXCHANGE)) return -1;
  return real(call, a[0], a[1], a[2], a[3], a[4], a[5]);
}

int close(int fd) {
  REAL(close);
  if (fd >= 0 && fd < FDS) inside[fd] = 0;
  return real(fd);
}

#define ON_FD(type, name, types, values) \
  type name types { \
    REAL(name); \
    if (tracked(fd) && faulty(#name, NULL)) return -1; \
    return real values; \
  }
ON_FD(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
ON_FD(ssize_t, writev, (int fd, const struct iovec *data, int count), (fd, data, count))
ON_FD(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t to), (fd, data, size, to))
ON_FD(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t to), (fd, data, size, to))
ON_FD(int, ftruncate, (int fd, off_t size), (fd, size))
ON_FD(int, ftruncate64, (int fd, off64_t size), (fd, size))
ON_FD(int, fdatasync, (int fd), (fd))

int fsync(int fd) {
  REAL(fsync);
  if (tracked(fd) && faulty("fsync", NULL)) return -1;
  if (tracked(fd) == 2 && lacking(FOLDER_SYNC)) return -1;
  return real(fd);
}
int fchmod(int fd, mode_t bits) {
  REAL(fchmod);
  if (tracked(fd) && (faulty("fchmod", NULL) || lacking(CHMOD))) return -1;
  return real(fd, bits);
}
int flock(int fd, int how) {
  REAL(flock);
  if (tracked(fd) && !(how & LOCK_UN) && (faulty("flock", NULL) || lacking(FLOCK))) return -1;
  return real(fd, how);
}

#define FCNTL(name) \
  int name(int fd, int what, ...) { \
    REAL(name); \
    va_list more; \
    va_start(more, what); \
    void *value = va_arg(more, void *); \
    va_end(more); \
    if (tracked(fd) && (what == F_SETLK || what == F_SETLKW || what == F_GETLK) && lacking(RECORD_LOCK)) \
      return -1; \
    return real(fd, what, value); \
  }
FCNTL(fcntl)
FCNTL(fcntl64)

#define ON_PATH(name, types, values) \
  int name types { \
    REAL(name); \
    if (below(path) && faulty(#name, path)) return -1; \
    return real values; \
  }
ON_PATH(unlink, (const char *path), (path))
ON_PATH(rmdir, (const char *path), (path))
ON_PATH(mkdir, (const char *path, mode_t bits), (path, bits))
ON_PATH(truncate, (const char *path, off_t size), (path, size))

int chmod(const char *path, mode_t bits) {
  REAL(chmod);
  if (below(path) && (faulty("chmod", path) || lacking(CHMOD))) return -1;
  return real(path, bits);
}
int fchmodat(int at, const char *path, mode_t bits, int flags) {
  REAL(fchmodat);
  if (below_at(at, path) && (faulty("fchmodat", path) || lacking(CHMOD))) return -1;
  return real(at, path, bits, flags);
}
int symlink(const char *to, const char *path) {
  REAL(symlink);
  if (below(path) && (faulty("symlink", path) || lacking(SYMLINK))) return -1;
  return real(to, path);
}
int symlinkat(const char *to, int at, const char *path) {
  REAL(symlinkat);
  if (below_at(at, path) && (faulty("symlinkat", path) || lacking(SYMLINK))) return -1;
  return real(to, at, path);
}
int link(const char *from, const char *path) {
  REAL(link);
  if (below(path) && (faulty("link", path) || lacking(HARDLINK))) return -1;
  return real(from, path);
}
int linkat(int from_at, const char *from, int at, const char *path, int flags) {
  REAL(linkat);
  if (below_at(at, path) && (faulty("linkat", path) || lacking(HARDLINK))) return -1;
  return real(from_at, from, at, path, flags);
}
int unlinkat(int at, const char *path, int flags) {
  REAL(unlinkat);
  if (below_at(at, path) && faulty("unlinkat", path)) return -1;
  return real(at, path, flags);
}
int mkdirat(int at, const char *path, mode_t bits) {
  REAL(mkdirat);
  if (below_at(at, path) && faulty("mkdirat", path)) return -1;
  return real(at, path, bits);
}
int rename(const char *from, const char *path) {
  REAL(rename);
  if (below(path) && faulty("rename", path)) return -1;
  return real(from, path);
}
int renameat(int from_at, const char *from, int at, const char *path) {
  REAL(renameat);
  if (below_at(at, path) && faulty("renameat", path)) return -1;
  return real(from_at, from, at, path);
}
