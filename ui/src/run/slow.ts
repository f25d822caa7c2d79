// A value that changes every second, seen every few seconds: for what costs the server more than a glance.

import { useEffect, useRef, useState } from "preact/hooks";

const SLOW_MS = 5000;

export function useSlow(value: number): number {
  const [slow, setSlow] = useState(value);
  const newest = useRef(value);
  newest.current = value;
  useEffect(() => {
    const timer = setInterval(() => setSlow(newest.current), SLOW_MS);
    return () => clearInterval(timer);
  }, []);
  return slow;
}
