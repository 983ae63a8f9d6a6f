# One line a module, alphabetical.
kvist_add_unit(base unit/base_test.c kvist_base)
kvist_add_unit(frame unit/frame_test.c kvist_wire)
kvist_add_unit(key unit/key_test.c kvist_key)
kvist_add_unit(layout unit/layout_test.c kvist_base)
kvist_add_unit(message unit/message_test.c kvist_wire)
