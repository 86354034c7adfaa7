# Shipped texts as C arrays, so that the binary needs no file beside it: the demo's document, and the
# texts of `kvtier quality`.
function(kvt_text_bytes path out)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${path})
  file(READ ${path} bytes HEX)
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
  string(REPLACE "0x0a," "0x0a,\n" bytes "${bytes}") # a line of text is a line of C
  set(${out} "${bytes}" PARENT_SCOPE)
endfunction()

kvt_text_bytes(${PROJECT_SOURCE_DIR}/share/demo/handbook.txt document)
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/demo/demo_document.h @ONLY CONTENT
"/* generated from share/demo/handbook.txt */
static const char demo_document[] = {@document@ 0};
static const size_t demo_document_len = sizeof(demo_document) - 1;
")

set(arrays "")
set(entries "")
foreach(name alice paradise-lost sqlite-header)
  kvt_text_bytes(${PROJECT_SOURCE_DIR}/share/quality/${name}.txt bytes)
  string(MAKE_C_IDENTIFIER ${name} id)
  string(APPEND arrays "static const char text_${id}[] = {${bytes} 0};\n")
  string(APPEND entries "    {\"${name} (shipped)\", text_${id}, sizeof(text_${id}) - 1},\n")
endforeach()
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/demo/quality_texts.h @ONLY CONTENT
"/* generated from share/quality */
@arrays@
static const struct {
    const char *name, *text;
    size_t len;
} quality_texts[] = {
@entries@};
")
target_include_directories(kvtier_tool PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/demo)
