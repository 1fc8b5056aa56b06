/* anthropic_internal.h - what the readers of a Messages request share. */
#ifndef LINNET_SERVE_ANTHROPIC_INTERNAL_H
#define LINNET_SERVE_ANTHROPIC_INTERNAL_H

#include "serve/anthropic.h"
#include "serve/openai_internal.h"

bool anthropic_is_string(const json_t *value, const char *text);

/* Whether it is an object with this type. */
bool anthropic_is_type(const json_t *value, const char *type);

/* system and messages, with the rules of who follows whom, as the chat's "messages". Of the parser
 * only the body and the fault are used. */
linnet_status anthropic_read_messages(struct parser *p, json_t *chat);

#endif
