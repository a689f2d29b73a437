/* Makes a folder slow, as if it were on a file server: each open and each stat of a path below $SLOW_FOLDER waits
   $SLOW_MS milliseconds. Preload it:

       cc -shared -fPIC -O2 -o slow_files.so slow_files.c      (loaded through LD_PRELOAD)
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct stat;
struct statx;

static void wait_below(int folder, const char *path) {
    const char *slow = getenv("SLOW_FOLDER");
    char link[32], parent[4096];
    if (!slow || !path)
        return;
    if (path[0] != '/' && folder != AT_FDCWD) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, parent, sizeof parent - 1);
        if (length < 0)
            return;
        parent[length] = 0;
        path = parent;
    }
    size_t length = strlen(slow);
    if (strncmp(path, slow, length) || (path[length] != '/' && path[length]))
        return;
    long microseconds = (long)(1000 * atof(getenv("SLOW_MS")));
    struct timespec left = {microseconds / 1000000, microseconds % 1000000 * 1000};
    while (nanosleep(&left, &left))
        ;
}

#define NEXT(name, result, ...) \
    static result (*next)(__VA_ARGS__); \
    if (!next) \
        next = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

/* The mode is passed on whether it was given or not: the kernel ignores it without O_CREAT. */
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        NEXT(name, int, const char *, int, ...); \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        wait_below(AT_FDCWD, path); \
        return next(path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        NEXT(name, int, int, const char *, int, ...); \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        wait_below(folder, path); \
        return next(folder, path, flags, mode); \
    }
#define STAT(name) \
    int name(const char *path, struct stat *status) { \
        NEXT(name, int, const char *, struct stat *); \
        wait_below(AT_FDCWD, path); \
        return next(path, status); \
    }
#define FSTATAT(name) \
    int name(int folder, const char *path, struct stat *status, int flags) { \
        NEXT(name, int, int, const char *, struct stat *, int); \
        wait_below(folder, path); \
        return next(folder, path, status, flags); \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
STAT(stat)
STAT(stat64)
STAT(lstat)
STAT(lstat64)
FSTATAT(fstatat)
FSTATAT(fstatat64)

int statx(int folder, const char *path, int flags, unsigned mask, struct statx *status) {
    NEXT(statx, int, int, const char *, int, unsigned, struct statx *);
    wait_below(folder, path);
    return next(folder, path, flags, mask, status);
}
