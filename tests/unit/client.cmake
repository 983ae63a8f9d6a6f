# libkvist against a peer that the test steps by hand.
foreach(part link pool)
    kvist_add_unit(client_${part} unit/client_${part}_test.c kvist_client_static)
    target_sources(test_client_${part} PRIVATE unit/client_fixture.c unit/client_peer.c)
endforeach()

# libkvist and the tool against a real kvistd.
if(KVIST_BUILD_DAEMON)
    add_executable(test_client_e2e e2e/client_e2e_test.c)
    target_link_libraries(test_client_e2e PRIVATE kvist_test_support kvist_tool_core)
    add_test(NAME client_e2e
        COMMAND test_client_e2e $<TARGET_FILE:kvistd> $<TARGET_FILE:kvist>)
    set_tests_properties(client_e2e PROPERTIES TIMEOUT 180 LABELS e2e)
endif()
