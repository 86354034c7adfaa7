# share/plan/plan.json as a C array, so that `kvtier plan` needs no file beside it.
set(plan_json ${PROJECT_SOURCE_DIR}/share/plan/plan.json)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${plan_json})
file(READ ${plan_json} plan_bytes HEX)
string(REGEX REPLACE "(..)" "0x\\1," plan_bytes "${plan_bytes}")
string(REPLACE "0x0a," "0x0a,\n" plan_bytes "${plan_bytes}")
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/plan/plan_shipped.h @ONLY CONTENT
"/* generated from share/plan/plan.json */
static const char plan_shipped[] = {@plan_bytes@ 0};
")
target_include_directories(kvtier_cli PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/plan)
