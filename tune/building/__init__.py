"""From a configuration to machine code: the pool of build processes and the store of what they built."""
