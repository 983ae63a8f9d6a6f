"""What the engine tests are built of: daemons, engines, servers, prompts, reference outputs."""
