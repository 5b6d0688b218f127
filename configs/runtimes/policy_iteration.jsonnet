// Sample, credit, train, sync; the VinePPO paper's seed. APP_SEED and APP_DIRECTORY override this file.
{
  type: 'policy_iteration',
  directory: 'experiments',
  seed: 2746318213,
}
