# The demo's document as a C array, so that the binary needs no file beside it.
set(KVT_DOCUMENT ${PROJECT_SOURCE_DIR}/share/demo/handbook.txt)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${KVT_DOCUMENT})
file(READ ${KVT_DOCUMENT} document HEX)
string(REGEX REPLACE "(..)" "0x\\1," document "${document}")
string(REPLACE "0x0a," "0x0a,\n" document "${document}") # a line of text is a line of C
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/demo/demo_document.h @ONLY CONTENT
"/* generated from share/demo/handbook.txt */
static const char demo_document[] = {@document@ 0};
static const size_t demo_document_len = sizeof(demo_document) - 1;
")
target_include_directories(kvtier_tool PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/demo)
