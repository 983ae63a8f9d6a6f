# Copy plans, on the host and on a runtime that behaves as a GPU.
foreach(part copy copy_fault)
    kvist_add_unit(${part} unit/${part}_test.c kvist_copy_rt_host)
    target_sources(test_${part} PRIVATE unit/copy_rig.c)
    # Some seconds; the thread sanitizer on a busy machine takes a minute.
    set_tests_properties(${part} PROPERTIES TIMEOUT 240)
endforeach()
kvist_add_unit(copy_ring unit/copy_ring_test.c kvist_copy)
