// Pages of records: XXH3-64 of each 4 KiB page, then XXH3-64 over the page hashes (format/record.h),
// optionally while they move (host to device or back, by the SMs) and while a record is completed
// (header, zero padding, checksum field).
//
// One warp per page. XXH3 hashes long inputs in stripes of 64 bytes with 8 accumulators: what a
// stripe adds depends only on its bytes and its place in its block of 16 stripes, so stripes of a
// block are summed in parallel and only the scrambling between the 4 blocks of a page is serial.
// Lane l has the accumulators 2p and 2p+1 with p = l%4 of the stripes g and g+8 of every block,
// with g = l/4: all loads are 512 contiguous bytes a warp.
#include "device.cuh"

namespace kvt {

constexpr uint32_t P32_1 = 0x9e3779b1u, P32_2 = 0x85ebca77u, P32_3 = 0xc2b2ae3du;
constexpr uint64_t P64_1 = 0x9e3779b185ebca87u, P64_2 = 0xc2b2ae3d27d4eb4fu,
                   P64_3 = 0x165667b19e3779f9u, P64_4 = 0x85ebca77c2b2ae63u,
                   P64_5 = 0x27d4eb2f165667c5u;

// The default secret of XXH3, as little-endian words.
__constant__ uint64_t SECRET[24] = {
    0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u,
    0x78e5c0cc4ee679cbu, 0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u,
    0xcb00c391bb52283cu, 0xa32e531b8b65d088u, 0x4ef90da297486471u, 0xd8acdea946ef1938u,
    0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au, 0x647378d9c97e9fc8u,
    0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
    0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu};

__device__ __forceinline__ uint64_t secret_word(uint32_t at)  // any byte offset up to 184
{
    uint32_t shift = 8 * (at & 7);
    uint64_t low = SECRET[at / 8];
    return shift == 0 ? low : (low >> shift) | (SECRET[at / 8 + 1] << (64 - shift));
}

__device__ __forceinline__ uint64_t fold(uint64_t a, uint64_t b)
{
    return (a * b) ^ __umul64hi(a, b);
}

__device__ __forceinline__ uint64_t avalanche(uint64_t h)
{
    h ^= h >> 37;
    h *= 0x165667919e3779f9u;
    return h ^ (h >> 32);
}

__device__ __forceinline__ uint64_t initial(uint32_t i)  // accumulator i
{
    constexpr uint64_t table[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    uint64_t value = table[0];
#pragma unroll
    for (uint32_t k = 1; k < 8; k++)
        value = i == k ? table[k] : value;
    return value;
}

__device__ __forceinline__ uint64_t product(uint64_t data, uint64_t secret)
{
    uint64_t key = data ^ secret;
    return static_cast<uint64_t>(static_cast<uint32_t>(key)) * (key >> 32);
}

__device__ __forceinline__ uint64_t scramble(uint64_t acc, uint64_t secret)
{
    return (acc ^ (acc >> 47) ^ secret) * P32_1;
}

// Sum of the four lanes' contributions of both accumulators, and the end of a long hash.
__device__ __forceinline__ uint64_t finish_long(uint64_t even, uint64_t odd, uint64_t len,
                                                const Lane &lane)
{
    uint64_t sum = fold(even ^ secret_word(11 + 16 * lane.c), odd ^ secret_word(19 + 16 * lane.c));
    sum += __shfl_xor_sync(FULL, sum, 1);
    sum += __shfl_xor_sync(FULL, sum, 2);
    return avalanche(len * P64_1 + sum);
}

struct Words {  // 16 bytes
    uint64_t even, odd;
};

// Hash of a page of which lane l has chunk[2*block + h]: stripe l/4 + 8h of the block, words 2p, 2p+1.
__device__ uint64_t page_hash(const Words *chunk, const Lane &lane)
{
    uint64_t secret_even[2], secret_odd[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t stripe = lane.row + 8 * h;
        secret_even[h] = SECRET[stripe + 2 * lane.c];
        secret_odd[h] = SECRET[stripe + 2 * lane.c + 1];
    }
    uint64_t sum[8];  // block*2 + (odd)
#pragma unroll
    for (int block = 0; block < 4; block++) {
        Words a = chunk[2 * block], b = chunk[2 * block + 1];
        uint64_t even = secret_even[1], odd = secret_odd[1];
        if (block == 3 && lane.row == 7) {  // the page's last stripe has a place of its own
            even = secret_word(192 - 64 - 7 + 16 * lane.c);
            odd = secret_word(192 - 64 - 7 + 16 * lane.c + 8);
        }
        sum[2 * block] = a.odd + product(a.even, secret_even[0]) + b.odd + product(b.even, even);
        sum[2 * block + 1] = a.even + product(a.odd, secret_odd[0]) + b.even + product(b.odd, odd);
    }
    // Reduce over the 8 stripe groups; lane group g ends with value g = block*2 + odd.
#pragma unroll
    for (int level = 0; level < 3; level++) {
        int half = 4 >> level, mask = 16 >> level;
        bool upper = lane.id & mask;
#pragma unroll
        for (int i = 0; i < half; i++) {
            uint64_t give = upper ? sum[i] : sum[i + half];
            uint64_t keep = upper ? sum[i + half] : sum[i];
            sum[i] = keep + __shfl_xor_sync(FULL, give, mask);
        }
    }
    // Groups 0 and 1 walk the blocks: accumulator 2p + (g & 1).
    uint32_t odd = lane.row & 1, which = 2 * lane.c + odd;
    uint64_t acc = initial(which);
#pragma unroll
    for (int block = 0; block < 4; block++) {
        acc += __shfl_sync(FULL, sum[0], (2 * block + odd) * 4 + lane.c);
        if (block < 3)
            acc = scramble(acc, SECRET[16 + which]);
    }
    uint64_t other = __shfl_xor_sync(FULL, acc, 4);
    return finish_long(odd ? other : acc, odd ? acc : other, KVT_GPU_PAGE_BYTES, lane);
}

__device__ __forceinline__ uint64_t mix(const uint64_t *in, uint32_t word, uint32_t secret_at)
{
    return fold(__ldcg(in + word) ^ secret_word(secret_at),
                __ldcg(in + word + 1) ^ secret_word(secret_at + 8));
}

// XXH3-64 of n <= 30 words. One lane.
__device__ uint64_t short_hash(const uint64_t *in, uint32_t n)
{
    uint64_t len = 8ull * n;
    if (n == 1) {
        uint64_t h = __ldcg(in);
        h = ((h >> 32) | (h << 32)) ^ (SECRET[1] ^ SECRET[2]);
        h ^= ((h << 49) | (h >> 15)) ^ ((h << 24) | (h >> 40));
        h *= 0x9fb21c651e98df25u;
        h ^= (h >> 35) + len;
        h *= 0x9fb21c651e98df25u;
        return h ^ (h >> 28);
    }
    if (n == 2) {
        uint64_t low = __ldcg(in) ^ (SECRET[3] ^ SECRET[4]);
        uint64_t high = __ldcg(in + 1) ^ (SECRET[5] ^ SECRET[6]);
        uint32_t upper = __byte_perm(static_cast<uint32_t>(low), 0, 0x0123);
        uint32_t lower = __byte_perm(static_cast<uint32_t>(low >> 32), 0, 0x0123);
        uint64_t swapped = (static_cast<uint64_t>(upper) << 32) | lower;
        return avalanche(len + swapped + high + fold(low, high));
    }
    uint64_t acc = len * P64_1;
    if (n <= 16) {
        for (uint32_t i = 0; i < (n + 3) / 4; i++)
            acc += mix(in, 2 * i, 32 * i) + mix(in, n - 2 - 2 * i, 32 * i + 16);
        return avalanche(acc);
    }
    for (uint32_t i = 0; i < 8; i++)
        acc += mix(in, 2 * i, 16 * i);
    acc = avalanche(acc);
    for (uint32_t i = 8; i < n / 2; i++)
        acc += mix(in, 2 * i, 16 * (i - 8) + 3);
    acc += mix(in, n - 2, 136 - 17);
    return avalanche(acc);
}

// XXH3-64 of n words in device memory, written by other warps. All lanes; groups work alike.
__device__ uint64_t words_hash(const uint64_t *in, uint32_t n, const Lane &lane)
{
    if (n <= 30)
        return short_hash(in, n);
    uint32_t p = lane.c, stripes = (n - 1) / 8;  // the last stripe is apart
    uint64_t even = initial(2 * p), odd = initial(2 * p + 1);
    for (uint32_t s = 0; s < stripes; s++) {
        uint64_t a = __ldcg(in + 8 * s + 2 * p), b = __ldcg(in + 8 * s + 2 * p + 1);
        uint32_t place = s % 16;
        even += b + product(a, SECRET[place + 2 * p]);
        odd += a + product(b, SECRET[place + 2 * p + 1]);
        if (place == 15) {
            even = scramble(even, SECRET[16 + 2 * p]);
            odd = scramble(odd, SECRET[17 + 2 * p]);
        }
    }
    uint64_t a = __ldcg(in + n - 8 + 2 * p), b = __ldcg(in + n - 8 + 2 * p + 1);
    even += b + product(a, secret_word(192 - 64 - 7 + 16 * p));
    odd += a + product(b, secret_word(192 - 64 - 7 + 16 * p + 8));
    return finish_long(even, odd, 8ull * n, lane);
}

// Byte offset in the page of chunk i of a lane.
__device__ __forceinline__ uint32_t chunk_at(int i, const Lane &lane)
{
    return (i >> 1) * 1024u + (i & 1) * 512u + lane.id * 16u;
}

__device__ __forceinline__ void load_page(const kvt_gpu_paging &job, uint32_t record,
                                          uint32_t page, const Lane &lane, Words *chunk)
{
    const char *from = reinterpret_cast<const char *>(job.from[record]) + page * 4096ull;
    const char *header = reinterpret_cast<const char *>(job.header[record]);
    uint32_t used = job.used_bytes - min(job.used_bytes, page * KVT_GPU_PAGE_BYTES);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t at = chunk_at(i, lane);
        const char *source = from + at;
        if (job.make && page == 0 && at < KVT_GPU_HEADER_BYTES)
            source = header + at;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (!job.make || at < used)
            v = *reinterpret_cast<const uint4 *>(source);
        chunk[i].even = (static_cast<uint64_t>(v.y) << 32) | v.x;
        chunk[i].odd = (static_cast<uint64_t>(v.w) << 32) | v.z;
    }
}

__device__ __forceinline__ void store_page(const kvt_gpu_paging &job, uint32_t record,
                                           uint32_t page, const Lane &lane, const Words *chunk)
{
    char *to = reinterpret_cast<char *>(job.to[record]) + page * 4096ull;
    bool moving = job.to[record] != job.from[record];
    uint32_t used = job.used_bytes - min(job.used_bytes, page * KVT_GPU_PAGE_BYTES);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t at = chunk_at(i, lane);
        bool made = job.make && (at >= used || (page == 0 && at < KVT_GPU_HEADER_BYTES));
        if (moving || made)
            *reinterpret_cast<uint4 *>(to + at) =
                make_uint4(static_cast<uint32_t>(chunk[i].even),
                           static_cast<uint32_t>(chunk[i].even >> 32),
                           static_cast<uint32_t>(chunk[i].odd),
                           static_cast<uint32_t>(chunk[i].odd >> 32));
    }
}

// The last page of a record is done: its checksum, its result.
__device__ void finish_record(const kvt_gpu_paging &job, uint32_t record, const Lane &lane)
{
    const uint64_t *hashes = reinterpret_cast<const uint64_t *>(job.page_hashes);
    uint64_t checksum = words_hash(hashes + static_cast<uint64_t>(record) * job.total_pages,
                                   job.total_pages, lane);
    if (lane.id != 0)
        return;
    if (job.make)
        *reinterpret_cast<uint64_t *>(job.to[record] + KVT_GPU_CHECKSUM_AT) = checksum;
    kvt_gpu_result *result = reinterpret_cast<kvt_gpu_result *>(job.results) + record;
    const uint32_t *status = reinterpret_cast<const uint32_t *>(job.status);
    result->checksum = checksum;
    result->status = status == nullptr ? KVT_GPU_STATUS_OK : status[record];
    result->done = 1;
    reinterpret_cast<uint32_t *>(job.counters)[record] = 0;
}

}  // namespace kvt

using namespace kvt;

extern "C" __global__ void __launch_bounds__(KVT_GPU_WARPS * 32, 1)
    kvt_gpu_pages(const __grid_constant__ kvt_gpu_paging job)
{
    Lane lane;
    uint32_t warps = gridDim.x * KVT_GPU_WARPS, total = job.records * job.pages;
    uint32_t *counters = reinterpret_cast<uint32_t *>(job.counters);
    uint64_t *hashes = reinterpret_cast<uint64_t *>(job.page_hashes);
    for (uint32_t index = blockIdx.x * KVT_GPU_WARPS + threadIdx.x / 32; index < total;
         index += warps) {
        uint32_t record = index / job.pages, page = index % job.pages;
        Words chunk[8];
        load_page(job, record, page, lane, chunk);
        // The checksum field (bytes 120 to 127) counts as zero: stripe 1, second word of pair 3.
        bool front = job.first_page + page == 0;
        if (front && lane.id == 7)
            chunk[0].odd = 0;
        if (job.make || job.to[record] == job.from[record]) {
            store_page(job, record, page, lane, chunk);
        } else {  // a plain move keeps the field
            Words whole = chunk[0];
            if (front && lane.id == 7)
                chunk[0].odd = *reinterpret_cast<const uint64_t *>(job.from[record] +
                                                                   KVT_GPU_CHECKSUM_AT);
            store_page(job, record, page, lane, chunk);
            chunk[0] = whole;
        }
        uint64_t hash = page_hash(chunk, lane);
        uint32_t finished = 0;
        if (lane.id == 0) {
            hashes[static_cast<uint64_t>(record) * job.total_pages + job.first_page + page] = hash;
            __threadfence();
            finished = atomicAdd(counters + record, 1u) + 1u;
        }
        if (__shfl_sync(FULL, finished, 0) == job.total_pages) {
            __threadfence();
            finish_record(job, record, lane);
        }
    }
}
