/* Constants of the codec (tables.h). */
#include "codec/tables.h"

const uint8_t kvt_c4_levels[KVT_C4_COUNT] = {6, 18, 31, 44, 58, 75, 96, 127};
const uint8_t kvt_c4_thresholds[KVT_SEARCH_COUNT][KVT_C4_COUNT - 1] = {
    {24, 49, 75, 102, 133, 171, 223},
    {22, 45, 68, 93, 121, 156, 203},
    {26, 53, 82, 111, 145, 186, 243},
};

const uint8_t kvt_c5_levels[KVT_C5_COUNT] = {3,  8,  13, 18, 24, 29, 35,  41,
                                             47, 54, 61, 70, 79, 90, 105, 127};
const uint8_t kvt_c5_thresholds[KVT_SEARCH_COUNT][KVT_C5_COUNT - 1] = {
    {11, 21, 31, 42, 53, 64, 76, 88, 101, 115, 131, 149, 169, 195, 232},
    {10, 19, 28, 38, 48, 58, 69, 80, 92, 105, 119, 136, 154, 177, 211},
    {12, 23, 34, 46, 58, 70, 83, 96, 110, 125, 143, 162, 184, 213, 253},
};

const uint8_t kvt_sign_bits[16] = {0x44, 0x49, 0xd0, 0x42, 0x3e, 0xe5, 0x76, 0xb2,
                                   0x56, 0x8f, 0x0c, 0x4d, 0xaf, 0x5e, 0x0c, 0x9f};
