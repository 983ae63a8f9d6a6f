add_library(kvist_test_engine STATIC support/engine.c)
target_link_libraries(kvist_test_engine PUBLIC kvist_storage kvist_key kvist_test_support)

kvist_add_unit(store unit/store_test.c kvist_test_engine)
