// Attention of prompts on Hopper: heads of 128 over a paged cache in bfloat16, in CUDA C++.
//
// It computes what kernels/hopper_prefill.py computes without windows, sinks and soft caps, with
// the same bits; that file says why a row has the same bits in every batch. Which programs there
// are, what they are given and how tiles lie in shared memory is the same. What differs is which
// instructions are under way at once.
//
// A program takes one kv head and up to 128 / group tokens of one sequence. Its rows are tokens
// times the heads of a group, these padded to a power of two. The programs of the last tokens come
// first.
//
//   warps 0 to 3, warps 4 to 7   64 rows each, over pairs of tiles of 64 positions
//   warp 8, warp 9               load keys, values: a pair a stage, in two stages
//
// For a row, in this order:
//
//   scores    One wgmma chain a pair, over the head's columns in ascending order.
//   maximum   By tile: the largest score times `scale` replaces the maximum only where it is more
//             than 8 above it.
//   weights   exp2(score * scale - maximum), a fused multiply-add. What was summed before is
//             multiplied by exp2(old maximum - maximum); by 1 it is not.
//   sums      Of weights in float32: of positions that differ in bit 3, then tile after tile; at
//             the end of a split over bits 2, 1 and 0 of the position, then 5 and 4.
//   values    Times the weights rounded to bfloat16, positions in ascending order. The values of a
//             pair are multiplied while the softmax of the next pair is computed.
//   splits    Of 512 positions, at absolute multiples of 512. Each begins without a maximum and
//             with sums of 0. Ended splits are in shared memory, each thread's own, and are merged
//             in order: old and new times exp2(their maximum - the larger of both).
//   result    Over the sum of weights, in float16 and in operand order.
//
// NVRTC compiles it, without headers and with -fmad=false: only `fmaf` fuses.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

namespace {

constexpr int kDim = 128;
constexpr int kTile = 64;
constexpr int kPair = 2 * kTile;
constexpr int kPairsPerSplit = 512 / kPair;
constexpr int kBlock = 16;  // positions of a block of the cache
constexpr int kBlocks = kPair / kBlock;
constexpr int kStages = 2;
constexpr int kRows = 64;  // of a warp group
constexpr int kThreads = 384;
constexpr u32 kColumnTile = kPair * 128;      // bytes: 128 positions of 64 columns
constexpr u32 kStageBytes = 2 * kColumnTile;  // all columns
constexpr u32 kQueryTile = kRows * 128;
// Shared memory, in bytes from its start; executors/cuda/attention.py asks for kShared of it.
constexpr u32 kQueries = 0;
constexpr u32 kKeys = kQueries + 4 * kQueryTile;
constexpr u32 kValues = kKeys + kStages * kStageBytes;
constexpr u32 kEnded = kValues + kStages * kStageBytes;
constexpr u32 kBarriers = kEnded + 2 * kRows * kDim * 4;
constexpr u32 kRaised = kBarriers + 64;  // of each warp group, of even and odd pairs
constexpr u32 kShared = kRaised + 64;
static_assert(kShared == 229504);
constexpr float kSlack = 8.0f;

// A CUtensorMap of the driver.
struct alignas(128) TensorMap {
  u64 opaque[16];
};

// As in executors/cuda/attention.py. Tiles are those of kernels/attention.py's TokenTiles.
struct Arguments {
  const u16* queries;  // bfloat16 [tokens, heads, kDim]
  const int* block_tables;
  const int* tile_rows;
  const int* tile_counts;
  const int* tile_positions;
  const int* tile_tables;
  const int* tile_starts;
  u16* out;     // float16 [tokens, out_stride], in operand order
  float scale;  // of scores, for exp2
  int out_stride;
  int num_heads;
  int num_kv_heads;
  int group;  // heads a kv head, up to a power of two
};

__device__ __forceinline__ float lowest() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float divided(float x, float y) {
  float z;
  asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@done bra DONE;\n"
      "bra AGAIN;\n"
      "DONE:\n"
      "}\n" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

__device__ __forceinline__ void load_tile(const TensorMap* map, u32 barrier, u32 target, int column,
                                          int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

// Programmatic dependent launch, as in kernels/hopper.py. Neither does anything where a launch is
// not dependent.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void allow_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// What generic loads and stores made of shared memory, for wgmma and TMA.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void group_sync(int who) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + who) : "memory");
}

// ---- wgmma

__device__ __forceinline__ void fence_sums() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Nothing that reads or writes `x` moves past: the compiler does not see what wgmma does later.
template <int N>
__device__ __forceinline__ void hold(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

#define REGISTERS_64                                                                             \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"  \
  "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define EIGHT(x, i)                                                                           \
  "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), \
      "+f"(x[i + 6]), "+f"(x[i + 7])
#define ALL_64(x)                                                                                 \
  EIGHT(x, 0), EIGHT(x, 8), EIGHT(x, 16), EIGHT(x, 24), EIGHT(x, 32), EIGHT(x, 40), EIGHT(x, 48), \
      EIGHT(x, 56)

// d = a * b + (adds ? d : 0), a and b in shared memory, both along columns
__device__ __forceinline__ void multiply_keys(float (&d)[64], u64 a, u64 b, int adds) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " REGISTERS_64
      ", %64, %65, p, 1, 1, 0, 0;\n"
      "}\n"
      : ALL_64(d)
      : "l"(a), "l"(b), "r"(adds));
}

// a in registers, b in shared memory, transposed
__device__ __forceinline__ void multiply_values(float (&d)[64], const u32* a, u64 b, int adds) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " REGISTERS_64
      ", {%64,%65,%66,%67}, %68, p, 1, 1, 1;\n"
      "}\n"
      : ALL_64(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

constexpr u64 kSwizzled = 0x4000004000000000ull;  // 128 bytes; groups of eight rows follow

__device__ __forceinline__ u64 key_operand(u32 address) {
  return kSwizzled | (u64)((address & 0x3ffff) >> 4);
}

__device__ __forceinline__ u64 value_operand(u32 address) {
  return kSwizzled | (u64)((address & 0x3ffff) >> 4) | (u64)(kColumnTile >> 4) << 16;
}

__device__ __forceinline__ u32 packed(float low, float high) {
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

__device__ __forceinline__ u32 packed_halves(float low, float high) {
  u32 x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

// Scores of all columns of 64 rows and 128 positions.
__device__ __forceinline__ void multiply_all_keys(float (&s)[64], u64 q, u64 k) {
#pragma unroll
  for (int column = 0; column < 8; column++) {
    multiply_keys(s, q + (column / 4) * (kQueryTile >> 4) + (column % 4) * 2,
                  k + (column / 4) * (kColumnTile >> 4) + (column % 4) * 2, column > 0);
  }
}

// Values of 16 positions a step, [FIRST, LAST) of the eight of a pair.
template <int FIRST, int LAST>
__device__ __forceinline__ void multiply_steps(float (&o)[64], const u32 (&p)[32], u64 v,
                                               int adds) {
#pragma unroll
  for (int step = FIRST; step < LAST; step++) {
    multiply_values(o, p + step * 4, v + step * 128, step > 0 ? 1 : adds);
  }
}

// ---- softmax. As wgmma leaves them, a thread has 64 numbers of two rows, eight apart: number i is
// of row i / 2 % 2 and column i / 4 * 8 + lane % 4 * 2 + i % 2.

struct Softmax {
  float maximum[2];  // what weights are relative to
  float sums[16];    // [row][16 positions][parity], of the split so far
  float first[2];    // factors of what was before the first tile of a pair, and before the second
  float second[2];
};

// Weights of one tile in place of its scores.
template <int HALF>
__device__ __forceinline__ void weigh(float (&s)[64], const float (&safe)[2], float scale) {
#pragma unroll
  for (int i = 0; i < 32; i++) {
    float& x = s[HALF * 32 + i];
    x = exp2_of(fmaf(x, scale, -safe[i / 2 % 2]));
  }
}

__device__ __forceinline__ bool is_needed(const float (&factor)[2]) {
  return __any_sync(0xffffffff, factor[0] != 1.0f || factor[1] != 1.0f);
}

__device__ __forceinline__ void scale_sums(float (&sums)[16], const float (&factor)[2]) {
  if (is_needed(factor)) {
#pragma unroll
    for (int i = 0; i < 16; i++) sums[i] = __fmul_rn(sums[i], factor[i / 8]);
  }
}

template <int HALF>
__device__ __forceinline__ void add_weights(const float (&s)[64], float (&sums)[16]) {
#pragma unroll
  for (int row = 0; row < 2; row++)
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int parity = 0; parity < 2; parity++) {
        const float* at = s + HALF * 32 + k * 8 + row * 2 + parity;
        float& sum = sums[row * 8 + k * 2 + parity];
        sum = __fadd_rn(sum, __fadd_rn(at[0], at[4]));
      }
}

template <int HALF>
__device__ __forceinline__ void maxima(const float (&s)[64], float (&most)[2]) {
  float m[4] = {s[HALF * 32], s[HALF * 32 + 2], s[HALF * 32 + 4], s[HALF * 32 + 6]};
#pragma unroll
  for (int i = 0; i < 32; i++) {
    float& x = m[i / 2 % 4];
    x = fmaxf(x, s[HALF * 32 + i]);
  }
  most[0] = fmaxf(m[0], m[2]);
  most[1] = fmaxf(m[1], m[3]);
}

__device__ __forceinline__ void softmax_of(float (&s)[64], Softmax& state, float scale) {
  float a[2], b[2];
  maxima<0>(s, a);
  maxima<1>(s, b);
#pragma unroll
  for (int lanes = 2; lanes > 0; lanes /= 2) {
    float c[4] = {
        __shfl_xor_sync(0xffffffff, a[0], lanes), __shfl_xor_sync(0xffffffff, a[1], lanes),
        __shfl_xor_sync(0xffffffff, b[0], lanes), __shfl_xor_sync(0xffffffff, b[1], lanes)};
    a[0] = fmaxf(a[0], c[0]);
    a[1] = fmaxf(a[1], c[1]);
    b[0] = fmaxf(b[0], c[2]);
    b[1] = fmaxf(b[1], c[3]);
  }
  float safe_a[2], safe_b[2];
#pragma unroll
  for (int row = 0; row < 2; row++) {
    float old = state.maximum[row];
    float most = __fmul_rn(a[row], scale);
    float middle = most > __fadd_rn(old, kSlack) ? most : old;
    most = __fmul_rn(b[row], scale);
    float last = most > __fadd_rn(middle, kSlack) ? most : middle;
    safe_a[row] = middle == lowest() ? 0.0f : middle;
    safe_b[row] = last == lowest() ? 0.0f : last;
    state.first[row] = exp2_of(__fsub_rn(old, safe_a[row]));
    state.second[row] = exp2_of(__fsub_rn(middle, safe_b[row]));
    // A row that has seen nothing has sums of 0: any factor will do.
    state.maximum[row] = last;
  }
  scale_sums(state.sums, state.first);
  weigh<0>(s, safe_a, scale);
  add_weights<0>(s, state.sums);
  weigh<1>(s, safe_b, scale);
  scale_sums(state.sums, state.second);
  add_weights<1>(s, state.sums);
}

__device__ __forceinline__ void scaled(float (&o)[64], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < 64; i++) o[i] = __fmul_rn(o[i], factor[i / 2 % 2]);
}

// Whether a warp of the group has rows whose maximum rose between the tiles of a pair. All warps
// must know, for they multiply together.
__device__ __forceinline__ void tell_raised(u32 raised, int pair, const float (&factor)[2]) {
  if (factor[0] != 1.0f || factor[1] != 1.0f) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(raised + pair % 2 * 4), "r"(pair) : "memory");
  }
}

__device__ __forceinline__ bool is_raised(u32 raised, int pair) {
  int found;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(found) : "r"(raised + pair % 2 * 4) : "memory");
  return __shfl_sync(0xffffffff, found, 0) == pair;
}

__device__ __forceinline__ void position_sums(const float (&sums)[16], float (&total)[2]) {
#pragma unroll
  for (int row = 0; row < 2; row++) {
    float of[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float x[2];
#pragma unroll
      for (int parity = 0; parity < 2; parity++) {
        float y = sums[row * 8 + k * 2 + parity];
        y = __fadd_rn(y, __shfl_xor_sync(0xffffffff, y, 2));
        x[parity] = __fadd_rn(y, __shfl_xor_sync(0xffffffff, y, 1));
      }
      of[k] = __fadd_rn(x[0], x[1]);
    }
    total[row] = __fadd_rn(__fadd_rn(of[0], of[2]), __fadd_rn(of[1], of[3]));
  }
}

// The sum of ended splits with a split's: ended * a + o * b; with that of the last split in `o`.
template <bool IS_LAST>
__device__ __forceinline__ void merge(float (&o)[64], float4* ended, bool has_ended,
                                      float (&row_max)[2], float (&row_sum)[2],
                                      const float (&split_max)[2], const float (&split_sum)[2]) {
  float a[2], b[2];
#pragma unroll
  for (int row = 0; row < 2; row++) {
    float most = fmaxf(row_max[row], split_max[row]);
    float safe = most == lowest() ? 0.0f : most;
    a[row] = exp2_of(__fsub_rn(row_max[row], safe));
    b[row] = exp2_of(__fsub_rn(split_max[row], safe));
    row_sum[row] = __fadd_rn(__fmul_rn(row_sum[row], a[row]), __fmul_rn(split_sum[row], b[row]));
    row_max[row] = most;
  }
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (has_ended) x = ended[i * 128];
    x.x = __fadd_rn(__fmul_rn(x.x, a[0]), __fmul_rn(o[4 * i], b[0]));
    x.y = __fadd_rn(__fmul_rn(x.y, a[0]), __fmul_rn(o[4 * i + 1], b[0]));
    x.z = __fadd_rn(__fmul_rn(x.z, a[1]), __fmul_rn(o[4 * i + 2], b[1]));
    x.w = __fadd_rn(__fmul_rn(x.w, a[1]), __fmul_rn(o[4 * i + 3], b[1]));
    if (IS_LAST) {
      o[4 * i] = x.x;
      o[4 * i + 1] = x.y;
      o[4 * i + 2] = x.z;
      o[4 * i + 3] = x.w;
    } else {
      ended[i * 128] = x;
    }
  }
}

// ---- a program's work, as in kernels/hopper_attention.py

struct Program {
  int kv_head, first_row, count, first_position, num_pairs;
  int num_old;       // positions of earlier steps
  const int* table;  // of the sequence's blocks
};

// ---- load: a warp for keys, one for values

// A lane for each block of a pair. Blocks past the end are block 0: what it holds is masked.
// Positions below `num_old` are of earlier steps; later ones were written by the previous kernel,
// which must have ended.
__device__ __forceinline__ void load_cache(const TensorMap* map, u32 tiles, u32 full, u32 empty,
                                           const Program& program, int num_kv_heads) {
  allow_next_kernel();
  int lane = threadIdx.x % 32;
  int end = program.first_position + program.count;
  int position = lane * kBlock;
  int block = lane < kBlocks && position < end ? program.table[position / kBlock] : 0;
  u32 stage = 0, phase = 1;
  bool has_waited = false;
#pragma unroll 1
  for (int pair = 0; pair < program.num_pairs; pair++) {
    position += kPair;
    int next = lane < kBlocks && position < end ? program.table[position / kBlock] : 0;
    if (!has_waited && (pair + 1) * kPair > program.num_old) {
      wait_for_previous_kernel();
      has_waited = true;
    }
    barrier_wait(empty + stage * 8, phase);
    if (lane == 0) barrier_expect(full + stage * 8, kStageBytes);
    __syncwarp();
    if (lane < kBlocks) {
      int row = (block * num_kv_heads + program.kv_head) * kBlock;
      u32 target = tiles + stage * kStageBytes + lane * (kBlock * 128);
      load_tile(map, full + stage * 8, target, 0, row);
      load_tile(map, full + stage * 8, target + kColumnTile, 64, row);
    }
    __syncwarp();
    block = next;
    stage++;
    if (stage == kStages) stage = 0, phase ^= 1;
  }
}

// ---- compute: two warp groups

__device__ __forceinline__ void load_queries(const Arguments& given, const Program& program,
                                             int who, u32 shared) {
  int heads_each = given.num_heads / given.num_kv_heads;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int chunk = threadIdx.x % 128 + i * 128;
    int row = chunk / 16, piece = chunk % 16;
    int r = who * kRows + row;
    int token = r / given.group, of_group = r % given.group;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (token < program.count && of_group < heads_each) {
      long long from = (long long)(program.first_row + token) * given.num_heads +
                       program.kv_head * heads_each + of_group;
      x = *(const uint4*)(given.queries + from * kDim + piece * 8);
    }
    u32 address = shared + kQueries + (who * 2 + piece / 8) * kQueryTile + row * 128 +
                  ((piece % 8) ^ (row % 8)) * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
  }
}

// Positions from `from` on of a stage of values. Both warp groups do so, with the same zeros.
__device__ __forceinline__ void zero_values(u32 stage, int from) {
  for (int i = threadIdx.x % 128; i < 2 * kPair * 8; i += 128) {
    int position = i / 8 % kPair;
    if (position >= from) {
      asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};" ::"r"(stage + i * 16), "r"(0)
                   : "memory");
    }
  }
}

// Scores of positions after those of the rows become -inf.
__device__ __forceinline__ void hide(float (&s)[64], int start, int first, int second) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 64; i++) {
    int position = start + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (position > (i / 2 % 2 ? second : first)) s[i] = lowest();
  }
}

__device__ __forceinline__ void compute(const Arguments& given, const Program& program, u32 shared,
                                        u8* memory) {
  int who = threadIdx.x / 128;
  int lane = threadIdx.x % 32;
  u32 key_full = shared + kBarriers, key_empty = key_full + 16, value_full = key_full + 32,
      value_empty = key_full + 48;
  u32 raised = shared + kRaised + who * 8;
  wait_for_previous_kernel();
  load_queries(given, program, who, shared);
  if (threadIdx.x % 128 < 2) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(raised + threadIdx.x % 2 * 4), "r"(-1) : "memory");
  }
  fence_async();
  group_sync(who);
  u64 q = key_operand(shared + kQueries + who * 2 * kQueryTile);
  u64 k = key_operand(shared + kKeys), v = value_operand(shared + kValues);
  float4* ended = (float4*)(memory + kEnded) + who * (kRows * kDim / 4) + threadIdx.x % 128;
  int row = who * kRows + threadIdx.x % 128 / 32 * 16 + lane / 4;
  int first_seen = program.first_position + row / given.group;
  int second_seen = program.first_position + (row + 8) / given.group;
  int lowest_seen = program.first_position + who * kRows / given.group;

  float s[64], o[64];
  u32 p[32];
  Softmax state;
  float row_max[2] = {lowest(), lowest()}, row_sum[2] = {0.0f, 0.0f};
  float ended_max[2], ended_sum[2];
  bool has_ended = false;
#pragma unroll
  for (int i = 0; i < 16; i++) state.sums[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 64; i++) o[i] = 0.0f;
  state.maximum[0] = state.maximum[1] = lowest();

  barrier_wait(key_full, 0);
  fence_sums();
  multiply_all_keys(s, q, k);
  commit();
  wait_products<0>();
  hold(s);
  if (lane == 0) barrier_arrive(key_empty);
  if (kPair - 1 > lowest_seen) hide(s, 0, first_seen, second_seen);
  softmax_of(s, state, given.scale);
  tell_raised(raised, 0, state.second);
#pragma unroll
  for (int i = 0; i < 32; i++) p[i] = packed(s[2 * i], s[2 * i + 1]);

  u32 stage = 0, phase = 0;  // of values; keys are one ahead
  int is_new = 1;            // the values to multiply next begin a split
  bool must_merge = false;
#pragma unroll 1
  for (int pair = 1; pair < program.num_pairs; pair++) {
    u32 key_stage = stage + 1, key_phase = phase;
    if (key_stage == kStages) key_stage = 0, key_phase ^= 1;
    barrier_wait(key_full + key_stage * 8, key_phase);
    group_sync(who);  // what `tell_raised` stored
    hold(s);
    fence_sums();
    multiply_all_keys(s, q, k + key_stage * (kStageBytes >> 4));
    commit();
    if (must_merge) {
      merge<false>(o, ended, has_ended, row_max, row_sum, ended_max, ended_sum);
      has_ended = true;
      must_merge = false;
    } else if (!is_new && is_needed(state.first)) {
      scaled(o, state.first);
    }
    barrier_wait(value_full + stage * 8, phase);
    u64 values = v + stage * (kStageBytes >> 4);
    hold(o);
    fence_sums();
    if (is_raised(raised, pair - 1)) {
      multiply_steps<0, 4>(o, p, values, !is_new);
      commit();
      wait_products<0>();
      hold(o);
      scaled(o, state.second);
      hold(o);
      fence_sums();
      multiply_steps<4, 8>(o, p, values, 1);
      commit();
    } else {
      multiply_steps<0, 8>(o, p, values, !is_new);
      commit();
      wait_products<1>();
    }
    hold(s);
    if (lane == 0) barrier_arrive(key_empty + key_stage * 8);
    is_new = pair % kPairsPerSplit == 0;
    if (is_new) {
      position_sums(state.sums, ended_sum);
#pragma unroll
      for (int i = 0; i < 16; i++) state.sums[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; i++) ended_max[i] = state.maximum[i], state.maximum[i] = lowest();
      must_merge = true;
    }
    int start = pair * kPair;
    if (start + kPair - 1 > lowest_seen) hide(s, start, first_seen, second_seen);
    softmax_of(s, state, given.scale);
    tell_raised(raised, pair, state.second);
    wait_products<0>();
    hold(o);
    if (lane == 0) barrier_arrive(value_empty + stage * 8);
#pragma unroll
    for (int i = 0; i < 32; i++) p[i] = packed(s[2 * i], s[2 * i + 1]);
    stage = key_stage;
    phase = key_phase;
  }
  if (must_merge) {
    merge<false>(o, ended, has_ended, row_max, row_sum, ended_max, ended_sum);
    has_ended = true;
  } else if (!is_new && is_needed(state.first)) {
    scaled(o, state.first);
  }
  barrier_wait(value_full + stage * 8, phase);
  int left = program.first_position + program.count - (program.num_pairs - 1) * kPair;
  if (left < kPair) {
    zero_values(shared + kValues + stage * kStageBytes, left);
    fence_async();
    group_sync(who);
  }
  u64 values = v + stage * (kStageBytes >> 4);
  hold(o);
  fence_sums();
  multiply_steps<0, 4>(o, p, values, !is_new);
  commit();
  wait_products<0>();
  hold(o);
  scaled(o, state.second);
  hold(o);
  fence_sums();
  multiply_steps<4, 8>(o, p, values, 1);
  commit();
  wait_products<0>();
  hold(o);
  position_sums(state.sums, ended_sum);
  merge<true>(o, ended, has_ended, row_max, row_sum, state.maximum, ended_sum);

  int heads_each = given.num_heads / given.num_kv_heads;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int r = row + half * 8;
    int token = r / given.group, of_group = r % given.group;
    if (token < program.count && of_group < heads_each) {
      int head = program.kv_head * heads_each + of_group;
      u16* to = given.out + (long long)(program.first_row + token) * given.out_stride + head * kDim;
#pragma unroll
      for (int c = 0; c < 4; c++) {
        u32 piece[4];
#pragma unroll
        for (int d = 0; d < 4; d++) {
          int i = (d * 4 + c) * 4 + half * 2;
          piece[d] = packed_halves(divided(o[i], row_sum[half]), divided(o[i + 1], row_sum[half]));
        }
        *(uint4*)(to + (c * 2 + lane % 4 / 2) * 16 + lane % 2 * 8) =
            make_uint4(piece[0], piece[1], piece[2], piece[3]);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
           const Arguments given) {
  extern __shared__ __align__(1024) u8 memory[];
  u32 shared = (u32)__cvta_generic_to_shared(memory);
  int tile = gridDim.y - 1 - blockIdx.y;
  Program program;
  program.count = given.tile_counts[tile];
  if (program.count == 0) return;
  program.kv_head = blockIdx.x;
  program.first_row = given.tile_rows[tile];
  program.first_position = given.tile_positions[tile];
  program.num_pairs = (program.first_position + program.count + kPair - 1) / kPair;
  program.num_old = given.tile_starts[tile];
  program.table = given.block_tables + given.tile_tables[tile];
  u32 key_full = shared + kBarriers, key_empty = key_full + 16, value_full = key_full + 32,
      value_empty = key_full + 48;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; stage++) {
      barrier_init(key_full + stage * 8, 1);
      barrier_init(key_empty + stage * 8, 8);  // warps
      barrier_init(value_full + stage * 8, 1);
      barrier_init(value_empty + stage * 8, 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async();
  }
  __syncthreads();
  if (threadIdx.x < 256) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    compute(given, program, shared, memory);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    int warp = threadIdx.x / 32;
    if (warp == 8) {
      load_cache(&keys, shared + kKeys, key_full, key_empty, program, given.num_kv_heads);
    } else if (warp == 9) {
      load_cache(&values, shared + kValues, value_full, value_empty, program, given.num_kv_heads);
    }
  }
}
