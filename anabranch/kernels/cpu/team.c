/* A team of threads for whoever calls: it lasts as long as the calling thread. */
void hold_team(int num_threads) {
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp barrier
  }
}
