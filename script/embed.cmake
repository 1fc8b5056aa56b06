# Makes a C file of a file's bytes. usage: cmake -DIN=page.html -DOUT=page.c -DNAME=page -DHEADER=serve/embedded.h -P embed.cmake
file(READ ${IN} bytes HEX)
string(LENGTH "${bytes}" size)
math(EXPR size "${size} / 2")
string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "'\\\\x\\1'," bytes "${bytes}")
file(WRITE ${OUT} "#include \"${HEADER}\"\n\nconst size_t ${NAME}_size = ${size};\nconst char ${NAME}_bytes[] = {\n${bytes}\n};\n")
