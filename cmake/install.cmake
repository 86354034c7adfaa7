# make install: libkvtier.so, headers, the tool, kvtier.pc, and a CMake package. Everything finds its
# neighbours relative to its own place, so that the prefix may be chosen at install time.
include(CMakePackageConfigHelpers)

install(TARGETS kvtier EXPORT kvtierTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY include/kvtier DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING
        PATTERN "*.h" PATTERN llama.h EXCLUDE)

file(RELATIVE_PATH KVT_BIN_TO_LIB /p/${CMAKE_INSTALL_BINDIR} /p/${CMAKE_INSTALL_LIBDIR})
set_target_properties(kvtier_tool PROPERTIES INSTALL_RPATH "$ORIGIN/${KVT_BIN_TO_LIB}")
install(TARGETS kvtier_tool kvtierd RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})

# README.md and docs/ as in the tree, without links to what is not installed.
install(CODE "execute_process(COMMAND \"${PROJECT_SOURCE_DIR}/scripts/make-docs.sh\"
  \"${PROJECT_SOURCE_DIR}\" \"${CMAKE_BINARY_DIR}/doc\" COMMAND_ERROR_IS_FATAL ANY)")
install(DIRECTORY ${CMAKE_BINARY_DIR}/doc/ DESTINATION ${CMAKE_INSTALL_DOCDIR})
# kvtierd's configuration, units and container file, to be copied from. The units name the prefix
# that was chosen at install time; KVT_SYSTEMD_UNIT_DIR puts them where systemd looks, too.
set(KVT_SYSTEMD_UNIT_DIR "" CACHE STRING "directory for units, as lib/systemd/system; empty: none")
set(KVT_DAEMON_DIR ${CMAKE_INSTALL_DATADIR}/kvtierd)
install(FILES share/kvtierd/kvtierd.conf share/kvtierd/kvtierd.socket share/kvtierd/kvtierd.sysusers
              share/kvtierd/Containerfile DESTINATION ${KVT_DAEMON_DIR})
install(CODE "set(KVT_BIN_DIR \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}\")
configure_file(\"${PROJECT_SOURCE_DIR}/share/kvtierd/kvtierd.service\"
               \"${CMAKE_BINARY_DIR}/kvtierd.service\" @ONLY)")
install(FILES ${CMAKE_BINARY_DIR}/kvtierd.service DESTINATION ${KVT_DAEMON_DIR})
if(KVT_SYSTEMD_UNIT_DIR)
  install(FILES share/kvtierd/kvtierd.socket ${CMAKE_BINARY_DIR}/kvtierd.service
          DESTINATION ${KVT_SYSTEMD_UNIT_DIR})
endif()

install(FILES share/plan/plan.json DESTINATION ${CMAKE_INSTALL_DATADIR}/kvtier)

if(TARGET kvtier_share)
  install(DIRECTORY ${CMAKE_BINARY_DIR}/share/man1 ${CMAKE_BINARY_DIR}/share/man8 DESTINATION ${CMAKE_INSTALL_MANDIR})
  install(DIRECTORY ${CMAKE_BINARY_DIR}/share/bash-completion ${CMAKE_BINARY_DIR}/share/zsh
          DESTINATION ${CMAKE_INSTALL_DATADIR})
endif()

set(KVT_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/kvtier)
install(EXPORT kvtierTargets NAMESPACE kvtier:: DESTINATION ${KVT_CMAKE_DIR})
configure_package_config_file(cmake/kvtierConfig.cmake.in ${CMAKE_BINARY_DIR}/kvtierConfig.cmake
                              INSTALL_DESTINATION ${KVT_CMAKE_DIR})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/kvtierConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/kvtierConfig.cmake ${CMAKE_BINARY_DIR}/kvtierConfigVersion.cmake
        DESTINATION ${KVT_CMAKE_DIR})

file(RELATIVE_PATH KVT_PC_TO_PREFIX /p/${CMAKE_INSTALL_LIBDIR}/pkgconfig /p)
string(REGEX REPLACE "/$" "" KVT_PC_TO_PREFIX "${KVT_PC_TO_PREFIX}")
configure_file(cmake/kvtier.pc.in ${CMAKE_BINARY_DIR}/kvtier.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/kvtier.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
