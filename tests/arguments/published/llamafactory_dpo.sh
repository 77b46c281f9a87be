FORCE_TORCHRUN=1 llamafactory-cli train llamafactory_dpo.yaml learning_rate=1e-6 pref_loss=orpo
