# KVT_STATIC: archives in place of the shared libraries that pkg-config names. What is built needs the C
# library alone then (and libstdc++ where llama.cpp is in it), and gets no update of them by itself.
function(kvt_link_archives target)
  set(found "")
  foreach(name ${ARGN})
    find_library(KVT_ARCHIVE_${name} lib${name}.a REQUIRED)
    list(APPEND found ${KVT_ARCHIVE_${name}})
  endforeach()
  set_property(TARGET ${target} PROPERTY INTERFACE_LINK_LIBRARIES ${found})
endfunction()

kvt_link_archives(PkgConfig::XXHASH xxhash)
if(TARGET PkgConfig::JANSSON)
  kvt_link_archives(PkgConfig::JANSSON jansson)
endif()
if(TARGET PkgConfig::LIBURING)
  kvt_link_archives(PkgConfig::LIBURING uring)
endif()
