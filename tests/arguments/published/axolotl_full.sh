accelerate launch -m axolotl.cli.train axolotl_full.yml --deepspeed deepspeed_configs/zero2.json
