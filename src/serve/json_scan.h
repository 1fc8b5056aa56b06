/*
 * json_scan.h - RFC 8259 read a byte at a time, to follow JSON that a model is still writing.
 * Checks the grammar and says where keys and values begin and end; builds nothing and allocates
 * nothing.
 */
#ifndef LINNET_SERVE_JSON_SCAN_H
#define LINNET_SERVE_JSON_SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    JSON_SCAN_DEPTH = 512, /* deeper is refused: clients' own parsers end near there */
    JSON_SCAN_TEXT = 80    /* bytes of a string that are kept */
};

enum json_step {
    JSON_STEP_MORE,
    JSON_STEP_KEY,   /* this byte ended a key, whose text is in `text` */
    JSON_STEP_BEGIN, /* this byte is the first of a value */
    JSON_STEP_END,   /* this byte is the last of a string, object or list; of a string see `text` */
    JSON_STEP_BAD    /* this byte cannot stand here; the scanner is of no use any more */
};

enum json_scan_state {
    JSON_SCAN_VALUE, /* a value must come */
    JSON_SCAN_FIRST_KEY,
    JSON_SCAN_KEY,
    JSON_SCAN_COLON,
    JSON_SCAN_FIRST_ELEMENT,
    JSON_SCAN_AFTER, /* a value has ended */
    JSON_SCAN_STRING,
    JSON_SCAN_ESCAPE,
    JSON_SCAN_HEX,
    JSON_SCAN_LITERAL,
    JSON_SCAN_MINUS,
    JSON_SCAN_ZERO,
    JSON_SCAN_INTEGER,
    JSON_SCAN_POINT,
    JSON_SCAN_FRACTION,
    JSON_SCAN_E,
    JSON_SCAN_SIGN,
    JSON_SCAN_EXPONENT
};

/* Zeroed at first. The text is complete once an object or list ends with depth 0. */
struct json_scan {
    enum json_scan_state state;
    size_t depth;
    bool is_key;                          /* of the string at hand */
    uint8_t n_hex;                        /* digits of \u still to come */
    uint16_t unit;                        /* what they spell */
    const char *literal;                  /* what is still to come of true, false or null */
    uint8_t objects[JSON_SCAN_DEPTH / 8]; /* a bit a level: an object, not a list */
    /* The last string without its escapes; a character beyond ASCII that was escaped is 0xFF here.
     * text_size goes on counting where text is full. */
    char text[JSON_SCAN_TEXT];
    size_t text_size;
};

enum json_step json_scan(struct json_scan *s, char c);

bool json_is_blank(char c);

#endif
