/* libaio's four functions over the system calls, for machines without libaio's header and library. */
#define _GNU_SOURCE
#include "tiered.h"

#if defined(TIERED_SYSTEM_LIBAIO)

const char *tiered_aio_provider(void) { return "libaio"; }

#else

#include <errno.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(SYS_io_setup) && __SIZEOF_LONG__ == 8

_Static_assert(sizeof(struct iocb) == 64, "struct iocb is the kernel's");
_Static_assert(sizeof(struct io_event) == 32, "struct io_event is the kernel's");

static int checked(long status) { return status < 0 ? -errno : (int)status; }

int io_setup(int maxevents, io_context_t *ctxp) { return checked(syscall(SYS_io_setup, maxevents, ctxp)); }

int io_destroy(io_context_t ctx) { return checked(syscall(SYS_io_destroy, ctx)); }

int io_submit(io_context_t ctx, long nr, struct iocb *ios[]) {
    return checked(syscall(SYS_io_submit, ctx, nr, ios));
}

int io_getevents(io_context_t ctx, long min_nr, long nr, struct io_event *events, struct timespec *timeout) {
    return checked(syscall(SYS_io_getevents, ctx, min_nr, nr, events, timeout));
}

const char *tiered_aio_provider(void) { return "system calls"; }

#else

int io_setup(int maxevents, io_context_t *ctxp) {
    (void)maxevents, (void)ctxp;
    return -ENOSYS;
}

int io_destroy(io_context_t ctx) {
    (void)ctx;
    return -ENOSYS;
}

int io_submit(io_context_t ctx, long nr, struct iocb *ios[]) {
    (void)ctx, (void)nr, (void)ios;
    return -ENOSYS;
}

int io_getevents(io_context_t ctx, long min_nr, long nr, struct io_event *events, struct timespec *timeout) {
    (void)ctx, (void)min_nr, (void)nr, (void)events, (void)timeout;
    return -ENOSYS;
}

const char *tiered_aio_provider(void) { return "none"; }

#endif
#endif
