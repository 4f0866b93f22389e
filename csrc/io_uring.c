/* io_uring over its three system calls: a submission ring, a completion ring, an eventfd.
 *
 * The rings are memory shared with the kernel. We own the submission tail and the completion head,
 * the kernel owns the other two; a release store publishes ours, an acquire load reads theirs.
 * Without SQPOLL the kernel looks at the submission ring only inside io_uring_enter, so entries that
 * it did not take can be withdrawn by moving the tail back. The completion ring has at least twice
 * as many entries as may be in flight and cannot overflow.
 */
#define _GNU_SOURCE
#include "tiered.h"

#include <errno.h>

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#endif
#endif

/* IORING_FEAT_RW_CUR_POS came with Linux 5.6, as did the READ and WRITE operations. */
#if defined(IORING_FEAT_RW_CUR_POS) && defined(SYS_io_uring_setup)

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct tiered_uring {
    int fd;
    unsigned *sq_head, *sq_tail, *sq_mask;
    unsigned *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    void *rings;
    size_t rings_bytes, sqes_bytes;
    unsigned entries;
};

static int supports_read_and_write(int fd) {
    enum { OPS = IORING_OP_WRITE + 1 };
    struct io_uring_probe *probe = calloc(1, sizeof *probe + OPS * sizeof probe->ops[0]);
    if (!probe) return -ENOMEM;
    int status = 0;
    if (syscall(SYS_io_uring_register, fd, IORING_REGISTER_PROBE, probe, OPS) < 0 ||
        probe->last_op < IORING_OP_WRITE || !(probe->ops[IORING_OP_READ].flags & IO_URING_OP_SUPPORTED) ||
        !(probe->ops[IORING_OP_WRITE].flags & IO_URING_OP_SUPPORTED))
        status = -EOPNOTSUPP;
    free(probe);
    return status;
}

static int map_rings(tiered_uring *ring, const struct io_uring_params *params) {
    size_t sq_bytes = params->sq_off.array + params->sq_entries * sizeof(unsigned);
    size_t cq_bytes = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;

    ring->rings_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    ring->sqes_bytes = params->sq_entries * sizeof(struct io_uring_sqe);
    ring->rings = mmap(NULL, ring->rings_bytes, protection, flags, ring->fd, IORING_OFF_SQ_RING);
    if (ring->rings == MAP_FAILED) return -errno;
    ring->sqes = mmap(NULL, ring->sqes_bytes, protection, flags, ring->fd, IORING_OFF_SQES);
    if (ring->sqes == MAP_FAILED) return -errno;

    char *base = ring->rings;
    ring->sq_head = (unsigned *)(base + params->sq_off.head);
    ring->sq_tail = (unsigned *)(base + params->sq_off.tail);
    ring->sq_mask = (unsigned *)(base + params->sq_off.ring_mask);
    ring->cq_head = (unsigned *)(base + params->cq_off.head);
    ring->cq_tail = (unsigned *)(base + params->cq_off.tail);
    ring->cq_mask = (unsigned *)(base + params->cq_off.ring_mask);
    ring->cqes = (struct io_uring_cqe *)(base + params->cq_off.cqes);
    ring->entries = params->sq_entries;
    unsigned *array = (unsigned *)(base + params->sq_off.array);
    for (unsigned i = 0; i < params->sq_entries; i++) array[i] = i; /* ring position i is always entry i */
    return 0;
}

int tiered_uring_open(uint32_t entries, int eventfd, tiered_uring **out) {
    struct io_uring_params params;
    memset(&params, 0, sizeof params);
    tiered_uring *ring = calloc(1, sizeof *ring);
    if (!ring) return -ENOMEM;
    ring->rings = ring->sqes = MAP_FAILED;

    int status = 0;
    ring->fd = (int)syscall(SYS_io_uring_setup, entries, &params);
    if (ring->fd < 0) status = -errno;
    if (!status && !(params.features & IORING_FEAT_SINGLE_MMAP)) status = -EOPNOTSUPP;
    if (!status) status = supports_read_and_write(ring->fd);
    if (!status) status = map_rings(ring, &params);
    if (!status && syscall(SYS_io_uring_register, ring->fd, IORING_REGISTER_EVENTFD, &eventfd, 1) < 0) status = -errno;
    if (status) {
        tiered_uring_close(ring);
        return status;
    }
    *out = ring;
    return 0;
}

int tiered_uring_submit(tiered_uring *ring, const tiered_uring_piece *pieces, uint32_t count) {
    unsigned first = *ring->sq_tail;
    if (count > ring->entries) count = ring->entries;
    for (unsigned i = 0; i < count; i++) {
        struct io_uring_sqe *sqe = &ring->sqes[(first + i) & *ring->sq_mask];
        memset(sqe, 0, sizeof *sqe);
        sqe->opcode = pieces[i].write ? IORING_OP_WRITE : IORING_OP_READ;
        sqe->fd = pieces[i].fd;
        sqe->off = pieces[i].offset;
        sqe->addr = pieces[i].address;
        sqe->len = pieces[i].nbytes;
        sqe->user_data = pieces[i].slot;
    }
    __atomic_store_n(ring->sq_tail, first + count, __ATOMIC_RELEASE);
    long status = syscall(SYS_io_uring_enter, ring->fd, count, 0, 0, NULL, 0);
    int error = status < 0 ? -errno : -EAGAIN;
    unsigned head = __atomic_load_n(ring->sq_head, __ATOMIC_ACQUIRE);
    __atomic_store_n(ring->sq_tail, head, __ATOMIC_RELEASE); /* withdraw what the kernel did not take */
    return head != first ? (int)(head - first) : count ? error : 0;
}

int tiered_uring_reap(tiered_uring *ring, tiered_uring_result *results, uint32_t count) {
    unsigned head = *ring->cq_head;
    unsigned tail = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE);
    unsigned n = 0;
    for (; head != tail && n < count; head++, n++) {
        const struct io_uring_cqe *cqe = &ring->cqes[head & *ring->cq_mask];
        results[n].slot = cqe->user_data;
        results[n].result = cqe->res;
    }
    __atomic_store_n(ring->cq_head, head, __ATOMIC_RELEASE);
    return (int)n;
}

void tiered_uring_close(tiered_uring *ring) {
    if (ring->sqes != MAP_FAILED) munmap(ring->sqes, ring->sqes_bytes);
    if (ring->rings != MAP_FAILED) munmap(ring->rings, ring->rings_bytes);
    if (ring->fd >= 0) close(ring->fd);
    free(ring);
}

#else

int tiered_uring_open(uint32_t entries, int eventfd, tiered_uring **out) {
    (void)entries, (void)eventfd, (void)out;
    return -ENOSYS;
}

int tiered_uring_submit(tiered_uring *ring, const tiered_uring_piece *pieces, uint32_t count) {
    (void)ring, (void)pieces, (void)count;
    return -ENOSYS;
}

int tiered_uring_reap(tiered_uring *ring, tiered_uring_result *results, uint32_t count) {
    (void)ring, (void)results, (void)count;
    return 0;
}

void tiered_uring_close(tiered_uring *ring) { (void)ring; }

#endif
