# What the Python wheel carries (pyproject.toml): libkvtier, kvtierd, the tool kvtier where jansson is
# here, and, where KVT_LLAMA_PREFIX names a llama.cpp, the adapter for it and that llama.cpp as one shared library. Under the names that the
# loader looks for, since a wheel has no symbolic links.
set(KVT_WHEEL_LIB kvtier/lib)
install(FILES $<TARGET_FILE:kvtier> DESTINATION ${KVT_WHEEL_LIB} RENAME libkvtier.so.0
        COMPONENT wheel)
add_custom_target(kvt_wheel)
add_dependencies(kvt_wheel kvtier)
# and the daemon, for engines of several processes, with the tool
if(TARGET kvtier_tool)
  install(PROGRAMS $<TARGET_FILE:kvtier_tool> DESTINATION kvtier/bin COMPONENT wheel)
  add_dependencies(kvt_wheel kvtier_tool)
endif()
if(NOT TARGET kvtierd) # KVT_TOOLS is off
  add_executable(kvtierd tools/kvtierd.c tools/kvtierd_help.c)
  string(TIMESTAMP day "%Y-%m-%d" UTC) # of its manual page
  set_source_files_properties(tools/kvtierd_help.c PROPERTIES
    COMPILE_DEFINITIONS "KVT_SOURCE_DATE=\"${day}\"")
  target_link_libraries(kvtierd PRIVATE kvtier_all)
endif()
install(PROGRAMS $<TARGET_FILE:kvtierd> DESTINATION kvtier/bin COMPONENT wheel)
add_dependencies(kvt_wheel kvtierd)

if(TARGET kvtier_llama)
  set_target_properties(kvtier_llama PROPERTIES BUILD_WITH_INSTALL_RPATH ON)
  install(FILES $<TARGET_FILE:kvtier_llama> DESTINATION ${KVT_WHEEL_LIB}
          RENAME libkvtier-llama.so.0 COMPONENT wheel)
  add_dependencies(kvt_wheel kvtier_llama)
  # The archives of the prefix are position-independent: linked whole they are a libllama.so, for a
  # llama-cpp-python that was installed without one (docs/engines/llama-cpp-python.md).
  file(GLOB archives ${KVT_LLAMA_PREFIX}/lib/lib*.a)
  if(archives MATCHES "libllama\\.a")
    set(anchor ${CMAKE_CURRENT_BINARY_DIR}/llama_shared.c)
    file(WRITE ${anchor} "extern const char *llama_version(void);\n"
                         "const char *kvt_wheel_llama(void);\n"
                         "const char *kvt_wheel_llama(void) { return llama_version(); }\n")
    add_library(kvt_llama_shared SHARED ${anchor})
    set_target_properties(kvt_llama_shared PROPERTIES OUTPUT_NAME llama)
    target_link_libraries(kvt_llama_shared PRIVATE
      -Wl,--whole-archive ${archives} -Wl,--no-whole-archive -Wl,-z,defs
      stdc++ m Threads::Threads ${CMAKE_DL_LIBS})
    install(FILES $<TARGET_FILE:kvt_llama_shared> DESTINATION ${KVT_WHEEL_LIB}/llama
            COMPONENT wheel)
    install(FILES ${KVT_LLAMA_PREFIX}/LICENSE ${KVT_LLAMA_PREFIX}/BUILD
            DESTINATION ${KVT_WHEEL_LIB}/llama COMPONENT wheel)
    add_dependencies(kvt_wheel kvt_llama_shared)
  endif()
endif()
