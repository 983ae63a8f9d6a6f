# libkvist against a peer that the test steps by hand.
foreach(part close link pool)
    kvist_add_unit(client_${part} unit/client_${part}_test.c kvist_client_static)
    target_sources(test_client_${part} PRIVATE unit/client_fixture.c unit/client_peer.c)
endforeach()
kvist_add_unit(client_tool unit/client_tool_test.c kvist_tool_core)

add_library(kvist_test_traces STATIC support/traces.c)
target_link_libraries(kvist_test_traces PUBLIC kvist_test_support PRIVATE m)
add_executable(test_replay unit/replay_test.c)
target_link_libraries(test_replay PRIVATE kvist_tool_core kvist_test_traces)
add_test(NAME replay COMMAND test_replay $<TARGET_FILE:kvist>)
set_tests_properties(replay PROPERTIES TIMEOUT 240 LABELS unit)

# libkvist and the tool against a real kvistd.
if(KVIST_BUILD_DAEMON)
    add_executable(test_client_e2e e2e/client_e2e_test.c)
    target_link_libraries(test_client_e2e PRIVATE kvist_test_support kvist_tool_core)
    add_test(NAME client_e2e
        COMMAND test_client_e2e $<TARGET_FILE:kvistd> $<TARGET_FILE:kvist>)
    # Engines are forked off beside one whose library has a thread, which ThreadSanitizer would end.
    set_tests_properties(client_e2e PROPERTIES TIMEOUT 180 LABELS e2e
        ENVIRONMENT "TSAN_OPTIONS=die_after_fork=0")
endif()

# Others' projects against what is installed; a sanitized library needs its sanitizer linked first.
find_program(KVIST_CXX_COMPILER NAMES c++ g++ clang++)
if(KVIST_BUILD_DAEMON AND KVIST_CXX_COMPILER AND NOT KVIST_SANITIZE)
    add_test(NAME export COMMAND ${CMAKE_COMMAND}
        -DBUILD=${PROJECT_BINARY_DIR} -DWORK=${CMAKE_CURRENT_BINARY_DIR}/export
        -DSOURCE=${CMAKE_CURRENT_SOURCE_DIR}/export -DLIBDIR=${CMAKE_INSTALL_LIBDIR}
        -DC_COMPILER=${CMAKE_C_COMPILER} -DCXX_COMPILER=${KVIST_CXX_COMPILER}
        -DGENERATOR=${CMAKE_GENERATOR}
        -P ${CMAKE_CURRENT_SOURCE_DIR}/export/run.cmake)
    set_tests_properties(export PROPERTIES TIMEOUT 180 LABELS export)
endif()
