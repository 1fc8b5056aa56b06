/* page.h - the web page of GET /: the bytes of page.html, made into C by the build. */
#ifndef LINNET_SERVE_PAGE_H
#define LINNET_SERVE_PAGE_H

#include <stddef.h>

extern const char page_bytes[];
extern const size_t page_size;

#endif
