/* Stands for libnccl.so.2 in a test: each function refuses what it should not be given. */
#include <stdlib.h>
#include <string.h>

typedef struct { char internal[128]; } Identity;
#define COMM ((void *)0x1234567890)
#define STREAM ((void *)77)
#define FLOAT 7

int ncclGetUniqueId(Identity *identity) {
  for (int i = 0; i < 128; i++) identity->internal[i] = (char)i;
  return 0;
}

int ncclCommInitRank(void **comm, int world, Identity identity, int rank) {
  for (int i = 0; i < 128; i++)
    if (identity.internal[i] != (char)i) return 4;
  *comm = COMM;
  return world == 2 && rank == 0 ? 0 : 4;
}

int ncclAllReduce(const void *in, void *out, size_t count, int type, int op, void *comm, void *stream) {
  if (comm != COMM || stream != STREAM || type != FLOAT || op != 0) return 3;
  memcpy(out, in, count * 4);
  return 0;
}

int ncclReduce(const void *in, void *out, size_t count, int type, int op, int root, void *comm, void *stream) {
  return count == 8 && op == 2 && root == 1 && comm == COMM && stream == STREAM ? 0 : 3;
}

int ncclBroadcast(const void *in, void *out, size_t count, int type, int root, void *comm, void *stream) {
  return count == 8 && root == 1 && comm == COMM && stream == STREAM ? 0 : 3;
}

const char *ncclGetErrorString(int status) { return status == 3 ? "it refuses" : "the identity is wrong"; }
