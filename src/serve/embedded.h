/* embedded.h - files that the build makes into C: the web page of GET /, the API's description. */
#ifndef LINNET_SERVE_EMBEDDED_H
#define LINNET_SERVE_EMBEDDED_H

#include <stddef.h>

extern const char page_bytes[], openapi_bytes[];
extern const size_t page_size, openapi_size;

#endif
