"""Operations that the layers share: loops, collectives, the bridge to jax, random bits, the cost of a kernel."""
