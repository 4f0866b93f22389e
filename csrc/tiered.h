/* The C ABI of tiered: pointers, sizes and scalars; no torch, no Python.
 *
 * cffi parses this file (csrc/build.py drops the preprocessor lines first) and the C and C++ sources
 * include it, so the two can never disagree. Everything here is stateless; the caller owns all memory.
 */
#ifndef TIERED_H
#define TIERED_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* ---- optimizer kernels (csrc/adam.cpp) ------------------------------------------------------- */

/* One Adam or AdamW update. The caller computes everything that depends on the step counter. */
typedef struct {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    double bias_correction1;      /* 1 - beta1^step */
    double bias_correction2_sqrt; /* sqrt(1 - beta2^step) */
    double grad_scale;            /* multiplies every gradient first: clipping, unscaling; 1.0 = off */
    int32_t decoupled;            /* 1: AdamW (decoupled decay), 0: Adam (L2 decay) */
    int32_t maximize;             /* 1: ascend */
} tiered_adam;

/* Gradient element types. */
enum { TIERED_F32 = 0, TIERED_BF16 = 1, TIERED_F16 = 2 };

/* param: fp32 weights, updated in place. n elements; threads >= 1. */
void tiered_adam_f32(int64_t n, float *param, const void *grad, int32_t grad_type,
                     float *exp_avg, float *exp_avg_sq, const tiered_adam *a, int32_t threads);

/* Split master: hi is the bf16 compute weight, lo the low 16 bits; together one fp32 master. */
void tiered_adam_split(int64_t n, uint16_t *hi, uint16_t *lo, const void *grad, int32_t grad_type,
                       float *exp_avg, float *exp_avg_sq, const tiered_adam *a, int32_t threads);

/* bf16 weights without a master: computed in fp32, rounded to nearest even. */
void tiered_adam_bf16(int64_t n, uint16_t *param, const void *grad, int32_t grad_type,
                      float *exp_avg, float *exp_avg_sq, const tiered_adam *a, int32_t threads);

/* fp32 <-> split master: hi rounds half away from zero; join(split(x)) has the bits of x for every pattern. */
void tiered_split_f32(int64_t n, const float *source, uint16_t *hi, uint16_t *lo, int32_t threads);
void tiered_join_f32(int64_t n, const uint16_t *hi, const uint16_t *lo, float *target, int32_t threads);

/* accumulator += addend, addend fp32, bf16 or fp16. */
void tiered_accumulate_f32(int64_t n, float *accumulator, const void *addend, int32_t addend_type, int32_t threads);

/* The memory traffic of tiered_adam_f32 (reads four arrays, writes three) with next to no arithmetic: the ceiling
 * that bench/adam.py compares with. */
void tiered_traffic_f32(int64_t n, float *a, const float *b, float *c, float *d, int32_t threads);

/* The instruction set that the kernels above run on here: "x86-64-v4", "x86-64-v3", "neon", "generic". */
const char *tiered_kernel_isa(void);

/* ---- libaio ------------------------------------------------------------------------------------
 *
 * The library's own interface. Where its header is found at build time that header is used instead
 * (TIERED_SYSTEM_LIBAIO) and cffi's generated code checks the declarations below against it;
 * elsewhere csrc/aio.c defines the same functions over the system calls. All return a count or 0,
 * or -errno.
 */
#ifdef TIERED_SYSTEM_LIBAIO
#include <libaio.h>
#else
struct timespec;
typedef struct io_context *io_context_t;
enum { IO_CMD_PREAD = 0, IO_CMD_PWRITE = 1 };

struct io_iocb_common {
    void *buf;
    unsigned long nbytes;
    long long offset;
    long long __pad3;
    unsigned flags; /* TIERED_IOCB_FLAG_RESFD: signal the eventfd resfd at completion */
    unsigned resfd;
};

struct iocb {
    void *data; /* comes back in io_event.data */
    unsigned key, aio_rw_flags;
    short aio_lio_opcode; /* IO_CMD_PREAD or IO_CMD_PWRITE */
    short aio_reqprio;
    int aio_fildes;
    union {
        struct io_iocb_common c;
    } u;
};

struct io_event {
    void *data;
    struct iocb *obj;
    unsigned long res; /* bytes moved, or -errno */
    unsigned long res2;
};

int io_setup(int maxevents, io_context_t *ctxp);
int io_destroy(io_context_t ctx);
int io_submit(io_context_t ctx, long nr, struct iocb *ios[]);
int io_getevents(io_context_t ctx, long min_nr, long nr, struct io_event *events, struct timespec *timeout);
#endif

enum { TIERED_IOCB_FLAG_RESFD = 1 };

/* Who provides the four functions above: "libaio", "system calls", or "none" (not Linux). */
const char *tiered_aio_provider(void);

/* ---- io_uring (csrc/io_uring.c) ----------------------------------------------------------------
 *
 * Positioned reads and writes over the raw system calls. One thread at a time per ring.
 */
typedef struct tiered_uring tiered_uring;

typedef struct {
    uint64_t address;
    uint64_t offset;
    uint64_t slot; /* comes back in the result */
    uint32_t nbytes;
    int32_t fd;
    int32_t write; /* 0: read, 1: write */
} tiered_uring_piece;

typedef struct {
    uint64_t slot;
    int64_t result; /* bytes moved, or -errno */
} tiered_uring_result;

/* A ring for `entries` pieces in flight that signals `eventfd` at each completion; 0 or -errno. */
int tiered_uring_open(uint32_t entries, int eventfd, tiered_uring **ring);

/* How many pieces, from the front, the kernel took; or -errno when it took none. Never waits. */
int tiered_uring_submit(tiered_uring *ring, const tiered_uring_piece *pieces, uint32_t count);

/* Takes up to `count` completions; how many. Never waits. */
int tiered_uring_reap(tiered_uring *ring, tiered_uring_result *results, uint32_t count);

/* Nothing may be in flight. */
void tiered_uring_close(tiered_uring *ring);

#ifdef __cplusplus
}
#endif
#endif
