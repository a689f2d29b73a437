/* Fake NCCL for the GPUs of fake_cuda.c: the ranks of a communicator share memory and wait for each other in a barrier.
   A collective is complete when the call returns. A communicator accepts only memory of its own device.

   As in NCCL, each rank listens on a TCP port as long as the communicator exists, and the ranks connect to each other in the
   first collective of each kind (NCCL_RUNTIME_CONNECT=1, the default).

   Environment: FAKE_NCCL_HANG (path). Once this file exists, a collective that waits for another rank returns, and the GPU
   never finishes it, as the real one does when a rank hangs. */
#define _GNU_SOURCE
#include "fake_cuda.h"
/* nccl.h includes these headers, which it does not need, and which torch's wheel lacks. */
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { HEADER_BYTES = 4096, CHUNK_BYTES = 4 << 20, POLL_MICROSECONDS = 50, POLL_MILLISECONDS = 20, MAX_GROUP = 64 };

enum kind { ALL_REDUCE, BROADCASTS, ALL_GATHER, KINDS };
/* The start of the shared memory. */
struct barrier { atomic_int arrived, generation; atomic_ushort ports[]; /* in network order, one per rank */ };
struct ncclComm {
  int rank, ranks, device;
  struct barrier *barrier; /* NULL if all ranks are threads of this process */
  char *chunks;            /* one of CHUNK_BYTES per rank */
  int listener, to_next[KINDS], from_previous[KINDS]; /* sockets; 0 before the first collective of the kind */
  atomic_bool aborted;
};

/* ---- Values of any type ---- */

static size_t type_bytes(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: abort();
  }
}
static float from_bfloat16(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
static uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* to nearest, ties to even */
}
#define C_TYPES(X)                                                                                                     \
  X(ncclInt8, int8_t) X(ncclUint8, uint8_t) X(ncclInt32, int32_t) X(ncclUint32, uint32_t) X(ncclInt64, int64_t)        \
  X(ncclUint64, uint64_t) X(ncclFloat16, _Float16) X(ncclFloat32, float) X(ncclFloat64, double)
static double load(const void *values, ncclDataType_t type, size_t index) {
  switch (type) {
#define LOAD(name, c_type) case name: return (double)((const c_type *)values)[index];
    C_TYPES(LOAD)
    case ncclBfloat16: return from_bfloat16(((const uint16_t *)values)[index]);
    default: abort();
  }
}
static void store(void *values, ncclDataType_t type, size_t index, double value) {
  switch (type) {
#define STORE(name, c_type) case name: ((c_type *)values)[index] = (c_type)value; break;
    C_TYPES(STORE)
    case ncclBfloat16: ((uint16_t *)values)[index] = to_bfloat16((float)value); break;
    default: abort();
  }
}
static double combine(double a, double b, ncclRedOp_t op) {
  switch (op) {
    case ncclMax: return b > a ? b : a;
    case ncclMin: return b < a ? b : a;
    case ncclProd: return a * b;
    default: return a + b;
  }
}

/* ---- Communicators ---- */

static bool another_rank_hangs(void) {
  const char *path = getenv("FAKE_NCCL_HANG");
  return path && access(path, F_OK) == 0;
}
/* Wait until all ranks arrive or one hangs; return false if this rank aborts the communicator first. */
static bool wait_for_all(ncclComm_t comm) {
  if (gpus_hang) return true;
  struct barrier *barrier = comm->barrier;
  int generation = atomic_load(&barrier->generation);
  if (atomic_fetch_add(&barrier->arrived, 1) == comm->ranks - 1) {
    atomic_store(&barrier->arrived, 0);
    atomic_fetch_add(&barrier->generation, 1);
    return true;
  }
  while (atomic_load(&barrier->generation) == generation) {
    if (atomic_load(&comm->aborted)) return false;
    if (another_rank_hangs()) {
      sleep(2); /* torch's timer of this collective runs already, and must end before that of the next one of Gloo */
      return gpus_hang = true;
    }
    usleep(POLL_MICROSECONDS);
  }
  return true;
}
#define BARRIER(comm) do { if (!wait_for_all(comm)) return ncclInternalError; } while (0)

/* ---- Sockets: a ring of TCP connections over loopback ---- */

static bool listen_on_loopback(ncclComm_t comm) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof address;
  comm->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(comm->listener, (struct sockaddr *)&address, size) || listen(comm->listener, comm->ranks)) return false;
  if (getsockname(comm->listener, (struct sockaddr *)&address, &size)) return false;
  atomic_store(&comm->barrier->ports[comm->rank], address.sin_port);
  return true;
}
static bool wait_for_socket(ncclComm_t comm, int fd, short events) {
  struct pollfd polled = {fd, events, 0};
  while (poll(&polled, 1, POLL_MILLISECONDS) == 0)
    if (atomic_load(&comm->aborted)) return false;
  return true;
}
/* Connect to the next rank, whose port may drop connections: then wait until this rank aborts the communicator. */
static bool connect_ring(ncclComm_t comm, enum kind kind) {
  if (comm->to_next[kind]) return true;
  in_port_t port = atomic_load(&comm->barrier->ports[(comm->rank + 1) % comm->ranks]);
  struct sockaddr_in next = {.sin_family = AF_INET, .sin_port = port, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  int to_next = comm->to_next[kind] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  connect(to_next, (struct sockaddr *)&next, sizeof next);
  log_line("nccl: rank %d connects", comm->rank);
  if (!wait_for_socket(comm, to_next, POLLOUT) || !wait_for_socket(comm, comm->listener, POLLIN)) return false;
  comm->from_previous[kind] = accept4(comm->listener, NULL, NULL, SOCK_CLOEXEC);
  return comm->from_previous[kind] >= 0;
}
static void close_sockets(ncclComm_t comm) {
  if (comm->listener) close(comm->listener);
  for (int kind = 0; kind < KINDS; kind++)
    if (comm->to_next[kind]) close(comm->to_next[kind]), close(comm->from_previous[kind]);
}
#define CONNECT(comm, kind) do { if (!connect_ring(comm, kind)) return ncclRemoteError; } while (0)

/* The id is the path of a file in memory, which the kernel removes when no process has it open. */
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  *id = (ncclUniqueId){0};
  int file = memfd_create("nccl", MFD_CLOEXEC);
  snprintf(id->internal, sizeof id->internal, "/proc/%d/fd/%d", (int)getpid(), file);
  return file < 0 ? ncclSystemError : ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *out, int ranks, ncclUniqueId id, int rank) {
  if (create_context(current_device, __func__)) return ncclUnhandledCudaError;
  size_t size = HEADER_BYTES + (size_t)ranks * CHUNK_BYTES;
  int creator = 0, creators_file = -1, file = open(id.internal, O_RDWR | O_CLOEXEC);
  sscanf(id.internal, "/proc/%d/fd/%d", &creator, &creators_file);
  if (file < 0 || ftruncate(file, (off_t)size)) return ncclSystemError;
  char *shared = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (shared == MAP_FAILED) return ncclSystemError;
  log_line("nccl: rank %d of %d on device %d", rank, ranks, current_device);
  ncclComm_t comm = *out = malloc(sizeof *comm);
  *comm = (struct ncclComm){rank, ranks, current_device, (struct barrier *)shared, shared + HEADER_BYTES};
  if (!listen_on_loopback(comm)) return ncclSystemError;
  BARRIER(comm);
  if (creator == getpid()) close(creators_file);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank, ncclConfig_t *) {
  return ncclCommInitRank(out, ranks, id, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int ranks, int rank, int, ncclUniqueId *ids, ncclConfig_t *) {
  return ncclCommInitRank(out, ranks, ids[0], rank);
}
ncclResult_t ncclCommInitAll(ncclComm_t *out, int count, const int *devices) {
  for (int rank = 0; rank < count; rank++) {
    out[rank] = malloc(sizeof **out);
    *out[rank] = (struct ncclComm){.rank = rank, .ranks = count, .device = devices ? devices[rank] : rank};
  }
  log_line("nccl: %d devices in one process", count);
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  log_line("nccl: destroy");
  close_sockets(comm);
  if (comm->barrier) munmap(comm->barrier, HEADER_BYTES + (size_t)comm->ranks * CHUNK_BYTES);
  free(comm);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  log_line("nccl: abort");
  atomic_store(&comm->aborted, true); /* not freed: another thread may wait in a barrier */
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *out) { *out = ncclSuccess; return ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t comm, int *out) { *out = comm->ranks; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *out) { *out = comm->rank; return ncclSuccess; }
ncclResult_t ncclCommRegister(const ncclComm_t, void *, size_t, void **out) { *out = NULL; return ncclSuccess; }
ncclResult_t ncclCommDeregister(const ncclComm_t, void *) { return ncclSuccess; }
const char *ncclGetLastError(ncclComm_t) { return "error of the fake NCCL"; }

/* ---- Groups: the calls of all devices of one process (DataParallel) run together at the end of the group ---- */

struct call {
  enum { BROADCAST, REDUCE } kind;
  const void *from;
  void *to;
  size_t count;
  ncclDataType_t type;
  int root;
  ncclComm_t comm;
};
static __thread struct call group[MAX_GROUP];
static __thread int group_size = 0, group_depth = 0;

static ncclResult_t add_to_group(struct call call) {
  if (group_size == MAX_GROUP) return ncclInternalError;
  group[group_size++] = call;
  return ncclSuccess;
}
/* Run one operation: a call of each rank, in any order. */
static void run_calls(const struct call *calls, int ranks) {
  const struct call *root = calls;
  while (root->comm->rank != root->root) root++;
  for (int rank = 0; root->kind == BROADCAST && rank < ranks; rank++)
    memmove(calls[rank].to, root->from, root->count * type_bytes(root->type));
  for (size_t i = 0; root->kind == REDUCE && i < root->count; i++) {
    double sum = 0;
    for (int rank = 0; rank < ranks; rank++) sum += load(calls[rank].from, root->type, i);
    store(root->to, root->type, i, sum);
  }
}
ncclResult_t ncclGroupStart(void) { group_depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) {
  if (--group_depth) return ncclSuccess;
  for (int first = 0; first < group_size; first += group[first].comm->ranks)
    run_calls(group + first, group[first].comm->ranks);
  group_size = 0;
  return ncclSuccess;
}

/* ---- Collectives ---- */

static ncclResult_t check_device(const void *address, ncclComm_t comm, const char *function) {
  const struct allocation *found = find_allocation(address);
  if (found && found->device == comm->device) return ncclSuccess;
  log_line("%s: memory of device %d, communicator of %d", function, found ? found->device : -2, comm->device);
  return ncclInvalidArgument;
}
#define CHECK_DEVICE(address) do { if (check_device(address, comm, __func__)) return ncclInvalidArgument; } while (0)

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t) {
  CHECK_DEVICE(from);
  CONNECT(comm, ALL_REDUCE);
  size_t bytes = type_bytes(type), most = CHUNK_BYTES / bytes;
  for (size_t first = 0; first < count; first += most) {
    size_t length = count - first < most ? count - first : most;
    memcpy(comm->chunks + comm->rank * CHUNK_BYTES, (const char *)from + first * bytes, length * bytes);
    BARRIER(comm);
    for (size_t i = 0; i < length; i++) {
      double value = load(comm->chunks, type, i);
      for (int rank = 1; rank < comm->ranks; rank++)
        value = combine(value, load(comm->chunks + rank * CHUNK_BYTES, type, i), op);
      store((char *)to + first * bytes, type, i, op == ncclAvg ? value / comm->ranks : value);
    }
    BARRIER(comm);
  }
  return ncclSuccess;
}
ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t, int root,
                        ncclComm_t comm, cudaStream_t) {
  /* torch calls it for DataParallel only, with ncclSum. */
  return comm->barrier ? ncclInvalidUsage : add_to_group((struct call){REDUCE, from, to, count, type, root, comm});
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t) {
  CHECK_DEVICE(to);
  if (!comm->barrier) return add_to_group((struct call){BROADCAST, from, to, count, type, root, comm});
  CONNECT(comm, BROADCASTS);
  size_t bytes = count * type_bytes(type);
  for (size_t first = 0; first < bytes; first += CHUNK_BYTES) {
    size_t length = bytes - first < CHUNK_BYTES ? bytes - first : CHUNK_BYTES;
    if (comm->rank == root) memcpy(comm->chunks, (const char *)from + first, length);
    BARRIER(comm);
    memcpy((char *)to + first, comm->chunks, length);
    BARRIER(comm);
  }
  return ncclSuccess;
}
ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t) {
  CHECK_DEVICE(from);
  CONNECT(comm, ALL_GATHER);
  size_t bytes = count * type_bytes(type);
  for (size_t first = 0; first < bytes; first += CHUNK_BYTES) {
    size_t length = bytes - first < CHUNK_BYTES ? bytes - first : CHUNK_BYTES;
    memcpy(comm->chunks + comm->rank * CHUNK_BYTES, (const char *)from + first, length);
    BARRIER(comm);
    for (int rank = 0; rank < comm->ranks; rank++)
      memcpy((char *)to + rank * bytes + first, comm->chunks + rank * CHUNK_BYTES, length);
    BARRIER(comm);
  }
  return ncclSuccess;
}
