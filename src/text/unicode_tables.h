/*
 * unicode_tables.h - where the Unicode versions of our libraries and of Hugging Face's tokenizers
 * differ. Without these tables a few hundred rare characters would give other ids.
 */
#ifndef LINNET_TEXT_UNICODE_TABLES_H
#define LINNET_TEXT_UNICODE_TABLES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct unicode_category {
    uint32_t first, last;
    char name[3]; /* general category: "Lu" */
};
extern const struct unicode_category unicode_recent_categories[];
extern const size_t unicode_recent_category_count;

/* Characters that Hugging Face's normalizers, built for an older Unicode, leave alone: no
 * decomposition, no composition, no reordering. */
bool unicode_is_inert(uint32_t code_point);

#endif
