// What the console uses of Preact's hooks. Values that begin as null are not typed.
type Effect = () => void | (() => void);
export function useEffect(effect: Effect, inputs?: unknown[]): void;
export function useLayoutEffect(effect: Effect, inputs?: unknown[]): void;
export function useMemo<T>(make: () => T, inputs: unknown[]): T;
export function useRef(initial: null | undefined): { current: any };
export function useRef<T>(initial: T): { current: T };
export function useState(initial: null): [any, (next: any) => void];
export function useState<T>(initial: T | (() => T)): [T, (next: T | ((old: T) => T)) => void];
export function useErrorBoundary(): [any, () => void];
