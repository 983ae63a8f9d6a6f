# The protocols of proto/shm/layout.h under every execution that C11 allows. Included by ../CMakeLists.txt.
set(model ${CMAKE_CURRENT_SOURCE_DIR}/model)
kvist_add_unit(litmus ${model}/litmus_test.c)
target_sources(test_litmus PRIVATE ${model}/explore.c ${model}/machine.c)
target_include_directories(test_litmus BEFORE PRIVATE ${model}/shadow)

# What uses shared memory is compiled once more, with the machine's atomics; the rest comes from the
# libraries. Threads are left with their locks held, which a thread sanitizer takes for a fault.
if(KVIST_BUILD_DAEMON AND NOT KVIST_SANITIZE MATCHES thread)
    kvist_add_unit(protocol ${model}/protocol_test.c kvist_storage kvist_client_static)
    target_sources(test_protocol PRIVATE
        ${model}/daemon.c ${model}/engine.c ${model}/explore.c ${model}/machine.c
        ${model}/world.c)
    foreach(source epoch fill lease pool receive)
        target_sources(test_protocol PRIVATE ${PROJECT_SOURCE_DIR}/client/${source}.c)
    endforeach()
    foreach(source arena block evict map page pool promote session slot spill)
        target_sources(test_protocol PRIVATE ${PROJECT_SOURCE_DIR}/storage/${source}.c)
    endforeach()
    target_include_directories(test_protocol BEFORE PRIVATE ${model}/shadow)
    target_compile_options(test_protocol PRIVATE -O2) # in every preset: it is a search
    target_compile_definitions(test_protocol PRIVATE KVIST_INDEX_READ_MAX=kvist_world_reads)
    target_link_options(test_protocol PRIVATE -Wl,--wrap=kvist_workers_submit)
endif()
