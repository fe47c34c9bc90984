"""The kernel that makes many copies at once. It is in PTX, which the driver compiles: no CUDA is needed to build.

A launch costs as much as a copy, some microseconds, so copying a hundred small arrays one by one takes longer than
reducing them. The kernel's parameter is the table of abi/copy_many.h; the code has the offsets of its fields as
numbers. Each block of 256 threads copies 32 KiB of one entry, in units as wide as the addresses allow.
"""

__all__ = ["NAME", "PTX"]

NAME = b"ncclpy_copy_many"

PTX = b"""
.version 6.0
.target sm_50
.address_size 64

.visible .entry ncclpy_copy_many(.param .align 8 .b8 table[4040])
.maxntid 256, 1, 1
{
    .reg .pred p, q;
    .reg .b32 block, low, high, middle, first, word, step, lane, t;
    .reg .b32 v<16>;
    .reg .b64 at, from, to, size, begin, left, i, source, target, table_base, wide_bytes;
    .reg .b16 byte;

    // Which entry this block belongs to: the last entry whose first block is at most this block.
    mov.u32 block, %ctaid.x;
    mov.u32 lane, %tid.x;
    mov.u64 table_base, table;
    ld.param.u32 high, [table];
    mov.u32 low, 0;
search:
    sub.u32 t, high, low;
    setp.le.u32 p, t, 1;
    @p bra found;
    add.u32 middle, low, high;
    shr.u32 middle, middle, 1;
    mul.wide.u32 at, middle, 4;
    add.u64 at, at, table_base;
    ld.param.u32 first, [at+3464];
    setp.le.u32 p, first, block;
    @p mov.u32 low, middle;
    @!p mov.u32 high, middle;
    bra search;
found:
    mul.wide.u32 at, low, 4;
    add.u64 at, at, table_base;
    ld.param.u32 first, [at+3464];
    mul.wide.u32 at, low, 8;
    add.u64 at, at, table_base;
    ld.param.u64 from, [at+8];
    ld.param.u64 to, [at+1160];
    ld.param.u64 size, [at+2312];

    // The 32 KiB of the entry that this block copies.
    sub.u32 t, block, first;
    mul.wide.u32 begin, t, 32768;
    setp.ge.u64 p, begin, size;
    @p bra done;
    sub.u64 left, size, begin;
    min.u64 left, left, 32768;
    add.u64 target, to, begin;
    cvta.to.global.u64 target, target;
    setp.eq.u64 q, from, 0;  // zeros
    add.u64 source, from, begin;
    @!q cvta.to.global.u64 source, source;

    // As wide as both addresses allow: 16 bytes, 4 or 1.
    or.b64 at, from, to;
    cvt.u32.u64 t, at;
    mov.u32 step, 16;
    and.b32 word, t, 15;
    setp.ne.u32 p, word, 0;
    @p mov.u32 step, 4;
    and.b32 word, t, 3;
    setp.ne.u32 p, word, 0;
    @p mov.u32 step, 1;
    mov.u64 wide_bytes, 0;
    setp.eq.u32 p, step, 1;
    @p bra bytes;
    setp.eq.u32 p, step, 4;
    @p bra words;

    and.b64 wide_bytes, left, -16;
    mul.wide.u32 i, lane, 16;
    @q bra zeros;
four:  // 4 units of 16 bytes for each thread, 4096 bytes apart, so that the block's accesses are contiguous
    add.u64 at, i, 12288;
    setp.ge.u64 p, at, wide_bytes;
    @p bra one;
    add.u64 at, source, i;
    ld.global.v4.u32 {v0, v1, v2, v3}, [at];
    ld.global.v4.u32 {v4, v5, v6, v7}, [at+4096];
    ld.global.v4.u32 {v8, v9, v10, v11}, [at+8192];
    ld.global.v4.u32 {v12, v13, v14, v15}, [at+12288];
    add.u64 at, target, i;
    st.global.v4.u32 [at], {v0, v1, v2, v3};
    st.global.v4.u32 [at+4096], {v4, v5, v6, v7};
    st.global.v4.u32 [at+8192], {v8, v9, v10, v11};
    st.global.v4.u32 [at+12288], {v12, v13, v14, v15};
    add.u64 i, i, 16384;
    bra four;
one:
    setp.ge.u64 p, i, wide_bytes;
    @p bra bytes;
    add.u64 at, source, i;
    ld.global.v4.u32 {v0, v1, v2, v3}, [at];
    add.u64 at, target, i;
    st.global.v4.u32 [at], {v0, v1, v2, v3};
    add.u64 i, i, 4096;
    bra one;
zeros:
    mov.u32 v0, 0;
more:
    setp.ge.u64 p, i, wide_bytes;
    @p bra bytes;
    add.u64 at, target, i;
    st.global.v4.u32 [at], {v0, v0, v0, v0};
    add.u64 i, i, 4096;
    bra more;

words:
    and.b64 wide_bytes, left, -4;
    mul.wide.u32 i, lane, 4;
each:
    setp.ge.u64 p, i, wide_bytes;
    @p bra bytes;
    mov.u32 v0, 0;
    add.u64 at, source, i;
    @!q ld.global.u32 v0, [at];
    add.u64 at, target, i;
    st.global.u32 [at], v0;
    add.u64 i, i, 1024;
    bra each;

bytes:  // what is left
    cvt.u64.u32 i, lane;
    add.u64 i, i, wide_bytes;
last:
    setp.ge.u64 p, i, left;
    @p bra done;
    mov.u16 byte, 0;
    add.u64 at, source, i;
    @!q ld.global.u8 byte, [at];
    add.u64 at, target, i;
    st.global.u8 [at], byte;
    add.u64 i, i, 256;
    bra last;
done:
    ret;
}
"""
